"""What `kvxfer launch ray` starts: its options checked, and what Ray is to reserve for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kvxfer.config import WorkerOptions, resolve
from kvxfer.errors import UsageError
from kvxfer.launch.ray_seam import Bundle, Node
from kvxfer.serve.options import RayOptions, check_seconds, check_serve
from kvxfer.serve.plan import OWN, SHARED_UTILIZATION


def check_ray(options: RayOptions, by_role: Mapping[str, WorkerOptions]) -> None:
    """Refuse what can be refused without a cluster. Raises UsageError."""
    check_serve(options)
    check_seconds("placement_timeout_s", options.placement_timeout_s)
    if not 0 <= options.num_cpus < math.inf:
        raise UsageError("num_cpus", options.num_cpus, "must be 0 or more and finite")
    gpus = options.num_gpus
    if gpus is not None and not (0 <= gpus <= 1 or (1 < gpus < math.inf and gpus == int(gpus))):
        raise UsageError("num_gpus", gpus, "must be a part of one GPU, or a whole number of them")
    for role, given in by_role.items():
        resolve(given, role)
        for field in OWN:
            if getattr(given, field) != getattr(WorkerOptions(model=given.model), field):
                reason = "kvxfer launch gives each worker its own"
                raise UsageError(field, getattr(given, field), reason)
        if given.device not in ("auto", "cpu", "cuda"):
            reason = "Ray chooses which GPUs: must be auto, cpu or cuda"
            raise UsageError("device", given.device, reason)
        if gpus and given.device != "cpu" and max(1, gpus) < given.tensor_parallel_size:
            reason = f"each of {given.tensor_parallel_size} ranks needs one of its own"
            raise UsageError("num_gpus", gpus, reason)
        if gpus == 0 and given.device == "cuda":
            raise UsageError("num_gpus", gpus, "device is cuda")


def check_hosts(nodes: list[Node], ip: str, has_keys: bool) -> None:
    """Without keys workers listen on loopback: all nodes have to be on this host, whose address is
    `ip`. Raises UsageError."""
    others = sorted({one.ip for one in nodes} - {ip})
    if others and not has_keys:
        reason = (
            f"the cluster has other hosts ({', '.join(others[:3])}), and only loopback addresses "
            "are allowed without keys: give key_file and peer_keys (kvxfer keygen), which lie at "
            "the same place on each host"
        )
        raise UsageError("key_file", None, reason)


def placed(
    options: RayOptions, given: WorkerOptions, nodes: list[Node], ip: str
) -> tuple[WorkerOptions, Bundle]:
    """What a worker's options become, and what Ray is to reserve for it. Pure. Where no keys are
    in use `ip` is the one host that it may be on."""
    has_gpus = any(node.resources.get("GPU", 0) > 0 for node in nodes)
    gpus = options.num_gpus
    if given.device == "cpu":
        gpus = 0.0
    elif gpus is None:
        wants = has_gpus or given.device == "cuda"
        gpus = float(given.tensor_parallel_size) if wants else 0.0
    own = given if gpus else replace(given, device="cpu")
    if 0 < gpus < 1 and given.gpu_memory_utilization is None:
        own = replace(own, gpu_memory_utilization=round(SHARED_UTILIZATION * gpus, 4))
    bundle = {"CPU": options.num_cpus, "GPU": gpus, "memory": float(given.memory_budget_bytes)}
    if given.key_file is None:
        bundle[f"node:{ip}"] = 0.001
    return own, {name: count for name, count in bundle.items() if count}
