"""`kvxfer bench transfer`: how fast KV moves between two processes, as a share of what the machine
can do, with every byte checked.

Two bare processes with real caches and connectors, and no model. Each transfer moves blocks at
random places; the target's were erased before and are compared with the source's pattern after.
Each is measured in turn with the machine's own copy of as many bytes, and ratios are of
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cyclopts import Parameter

from kvxfer.errors import KvxferError, UsageError

CASES = {
    "peer-nvlink": "peer pulls from GPU to GPU, growable memory on both",
    "peer-layouts": "the worst of the 36 pairs of layouts against the quickest of equal ones",
    "peer-vs-nixl": "peer on growable memory against NIXL on fixed memory",
    "peer-one-gpu": "peer, both processes on one GPU",
    "nixl-growable": "NIXL on growable GPU memory, direct and staged",
    "peer-host": "peer on host memory",
    "nixl-overhead": "NIXL through our connector against bare NIXL",
}
ALL = "all"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What `kvxfer bench transfer` may be told."""

    devices: str = "auto"
    """The source's and the target's, such as cuda:0,cuda:1 or cpu,cpu (auto: two GPUs, one twice,
    or the host, whichever is there)."""
    runs: int = 5
    """Transfers measured of each kind."""
    warm_up: int = 2
    """Transfers of each kind before, which are not."""
    sizes: tuple[int, ...] = ()
    """KiB of the runs that move; given once for each (default: those of the case)."""
    mib: int = 1024
    """MiB that a transfer between GPUs moves."""
    host_mib: int = 256
    """MiB that a transfer between host memories moves."""
    peer_connector: str = "peer"
    """Module of connectors/ that the cases of `peer` measure."""
    staged_connector: str = "staged"
    """Module of connectors/ that goes through a ring of fixed memory."""
    json: Path | None = None
    """Keep the figures of one case in this file, from the first ones on."""
    json_dir: Path | None = None
    """Keep the figures of each case in transfer-CASE.json in this directory."""


def run_transfer(case: str, options: TransferOptions) -> int:
    """Measure one case or all, print, write; 1 when a bar was missed, or where a case of several
    failed. Raises KvxferError."""
    if case != ALL and case not in CASES:
        raise UsageError("case", case, f"must be {ALL} or one of {', '.join(CASES)}")
    _check(case, options)
    if case != ALL:
        return _run(case, options)
    codes = []
    for name in CASES:
        try:
            codes.append(_run(name, options))
        except KvxferError as error:
            print(f"{name}: failed: {error}", flush=True)
            codes.append(error.exit_code)
    return max(codes)


def _check(case: str, options: TransferOptions) -> None:
    for name in ("runs", "mib", "host_mib"):
        if getattr(options, name) < 1:
            raise UsageError(name, getattr(options, name), "must be at least 1")
    if options.warm_up < 0:
        raise UsageError("warm_up", options.warm_up, "is negative")
    if case == ALL and options.json is not None:
        raise UsageError("json", str(options.json), "is for one case: use --json-dir")
    if options.json_dir is not None and not options.json_dir.is_dir():
        raise UsageError("json_dir", str(options.json_dir), "is no directory")


def _run(case: str, options: TransferOptions) -> int:
    from kvxfer.bench.record import Record, command_line
    from kvxfer.bench.report import describe_machine
    from kvxfer.bench.transfer_cases import Bench, figures_of
    from kvxfer.bench.transfer_devices import resolve_devices

    devices = resolve_devices(options.devices)
    path = options.json
    if path is None and options.json_dir is not None:
        path = options.json_dir / f"transfer-{case}.json"
    record = Record(path, command_line(f"transfer {case}", replace(options, json_dir=None)))
    record.machine = describe_machine(devices[1])
    if len(set(devices)) > 1:
        record.machine = f"2 × {record.machine}"
    print(f"{case}: {CASES[case]}", flush=True)
    for found in figures_of(case, Bench(options, devices)):
        if isinstance(found, str):
            print(f"{case}: {found}", flush=True)
        else:
            record.add(found)
    return record.exit_code
