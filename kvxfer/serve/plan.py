"""What `kvxfer serve` starts on this host: workers, their addresses, their share of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kvxfer.config import CPU_KV_CACHE_BYTES, WorkerOptions, resolve
from kvxfer.config_file import HIDDEN
from kvxfer.control.addresses import IPC
from kvxfer.errors import UsageError
from kvxfer.launch.local import divide_budget
from kvxfer.launch.supervisor import WorkerPlan

SHARED_UTILIZATION = 0.92
"""Of a GPU that workers share, divided among them: vLLM's default for one that is not alone."""
OWN = ("listen", "worker_id")
"""What `serve` gives each worker itself."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to divide."""

    num_gpus: int
    free_bytes: int
    """Host memory that a process may take."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    workers: tuple[WorkerPlan, ...]
    notes: tuple[str, ...]
    """What was decided, a line each."""

    def addresses(self, role: str) -> list[str]:
        return [one.address for one in self.workers if one.module == role]


def count_gpus(dev: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> int:
    """NVIDIA's devices that this process may use; asking torch would cost seconds."""
    present = sum(path.name.removeprefix("nvidia").isdigit() for path in dev.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [one for one in visible.split(",") if one.strip() not in ("", "-1", "NoDevFiles")]
    return min(present, len(named))


def plan_serve(
    counts: Mapping[str, int],
    options: Mapping[str, WorkerOptions],
    machine: Machine,
    run_dir: Path,
) -> ServePlan:
    """`counts` and `options` by role, prefill first; sockets lie in `run_dir`. Pure.

    Raises UsageError for options that no worker would take.
    """
    for role, given in options.items():
        resolve(given, role)
        for field in OWN:
            if getattr(given, field) != _default(field):
                reason = "kvxfer serve gives each worker its own"
                raise UsageError(field, getattr(given, field), reason)
    names = [(role, f"{role}-{index}") for role, count in counts.items() for index in range(count)]
    placed, notes = _placed(names, options, machine)
    listens = {name: f"{IPC}{run_dir / name}" for _, name in names}
    addresses = {name: _dialled(listens[name], options[role]) for role, name in names}
    prefills = [addresses[name] for role, name in names if role == "prefill"]
    workers = []
    for index, (role, name) in enumerate(names):
        own = replace(placed[name], worker_id=name, listen=listens[name])
        if own.metrics_port:  # one host, so a port for each
            own = replace(own, metrics_port=own.metrics_port + index)
        more = [word for one in prefills for word in ("--prefill", one)] if role == "decode" else []
        workers.append(WorkerPlan(name, role, (*as_arguments(own), *more), addresses[name]))
    return ServePlan(tuple(workers), tuple(notes))


def _dialled(listen: str, options: WorkerOptions) -> str:
    """With keys whoever dials says whose key belongs there: one of several may be allowed."""
    return listen if options.key_file is None else f"{listen}#{options.key_file.stem}"


def as_arguments(options: WorkerOptions) -> list[str]:
    """The flags that give a worker these options."""
    found = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in HIDDEN or value == _default(field.name):
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = str(value.resolve() if isinstance(value, Path) else value)
            found.append(f"--{flag}={text}")
    return found


def _default(name: str) -> object:
    return next(field.default for field in fields(WorkerOptions) if field.name == name)


def _placed(
    names: Sequence[tuple[str, str]], options: Mapping[str, WorkerOptions], machine: Machine
) -> tuple[dict[str, WorkerOptions], list[str]]:
    """Each worker's options with its device and its share of memory, and what to say of it."""
    on_gpu = [(role, name) for role, name in names if _wants_gpu(options[role], machine)]
    on_host = [one for one in names if one not in on_gpu]
    placed, notes = _on_gpus(on_gpu, options, machine.num_gpus)
    share = divide_budget(machine.free_bytes, max(1, len(names)), machine.free_bytes)
    cache = CPU_KV_CACHE_BYTES // max(1, len(on_host))
    cache = cache if cache <= share // 2 else 0  # else what is left of its share after warm-up
    is_divided = False
    for role, name in on_host:
        placed[name] = options[role]
        if not (options[role].memory_budget_bytes or options[role].kv_cache_memory_bytes):
            is_divided = True
            placed[name] = replace(
                options[role], memory_budget_bytes=share, kv_cache_memory_bytes=cache
            )
    if is_divided:
        of_it = f", {cache >> 20} MiB of it KV cache" if cache else ""
        notes.append(f"host memory: {share >> 20} MiB for each of {len(names)} workers{of_it}")
    return placed, notes


def _wants_gpu(options: WorkerOptions, machine: Machine) -> bool:
    return options.device.startswith("cuda") or (options.device == "auto" and machine.num_gpus > 0)


def _on_gpus(
    names: Sequence[tuple[str, str]], options: Mapping[str, WorkerOptions], num_gpus: int
) -> tuple[dict[str, WorkerOptions], list[str]]:
    """Round robin, a GPU for each rank; where there are fewer than ranks they are shared, and each
    worker is told its part of one. A device that was asked for stays."""
    placed, users, at = {}, [0] * max(1, num_gpus), 0
    for role, name in names:
        given, size = options[role], options[role].tensor_parallel_size
        if given.device == "auto":
            if size > num_gpus:
                reason = f"{num_gpus} GPU(s) are here, and each rank needs one of its own"
                raise UsageError("tensor_parallel_size", size, reason)
            taken = [(at + rank) % num_gpus for rank in range(size)]
            at += size
            given = replace(given, device=",".join(f"cuda:{index}" for index in taken))
        for one in given.device.split(","):
            index = int(one.partition(":")[2] or 0)
            if index < len(users):
                users[index] += 1
        placed[name] = given
    most = max(users)
    if most < 2:
        return placed, [f"{name} on {placed[name].device}" for _, name in names]
    notes = []
    for _, name in names:
        given = placed[name]
        whole = given.gpu_memory_utilization or SHARED_UTILIZATION
        placed[name] = replace(given, gpu_memory_utilization=round(whole / most, 4))
        share = f"{placed[name].gpu_memory_utilization:g} of its memory"
        notes.append(f"{name} on {given.device}, {share}: up to {most} workers share a GPU")
    return placed, notes
