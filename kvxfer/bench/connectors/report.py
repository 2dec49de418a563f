"""What a run of `kvxfer bench connectors` found, as it is kept in a file and compared."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvxfer.errors import UsageError

FORMAT = "kvxfer-bench-connectors/1"


class Spread(msgspec.Struct, frozen=True):
    """The median of some runs, and the distance between their quartiles."""

    median: float
    iqr: float = 0.0


class Latency(msgspec.Struct, frozen=True):
    """Of whole transfers, in µs."""

    average: float
    p50: float
    p99: float
    p999: float


class Ceiling(msgspec.Struct, frozen=True):
    """What this machine's own copy of as many bytes came to, in the same run."""

    name: str
    """memcpy, socket, device copy …"""
    gb_per_s: Spread


class Kind(msgspec.Struct, frozen=True):
    """What is moved, and how: rows of one kind may be compared."""

    connector: str
    operation: str
    """WRITE (a push) or READ (a pull)."""
    mode: str
    """direct, or staged: through memory that is not the cache's."""
    initiator_memory: str
    """DRAM or VRAM, as nixlbench calls them."""
    target_memory: str
    layouts: str
    """The source's and the destination's, such as LBHNC>LBHNC."""
    block_bytes: int
    """Of a block's run in memory: what lies side by side at both ends."""
    batch: int
    """Blocks of a transfer."""
    chunk_bytes: int
    """Of the committed memory that they lie in."""


class Row(msgspec.Struct, frozen=True):
    """One kind, measured. `problem` is why it is not, or not as a whole; then the rest is what was
    seen until then."""

    kind: Kind
    gb_per_s: Spread = Spread(0.0)
    latency_us: Latency = Latency(0.0, 0.0, 0.0, 0.0)
    prepare_us: float = 0.0
    """Until the transport has its descriptors: the median."""
    post_us: float = 0.0
    """Until it has begun."""
    transfer_us: float = 0.0
    """From there until it ended."""
    descriptors: int = 0
    """That the transport was given for a transfer."""
    bytes_per_descriptor: float = 0.0
    ceiling: str = ""
    """The name of the Ceiling that `share` is of."""
    share: Spread = Spread(0.0)
    """Of neighbours in time: the transfer's rate to the ceiling's."""
    verified_bytes: int = 0
    """Compared with what the source held."""
    runs: int = 0
    problem: str = ""


class Report(msgspec.Struct, frozen=True):
    machine: str
    versions: dict[str, str]
    commit: str
    command: str
    settings: dict[str, str | int | float]
    """What was measured: runs of other settings are not compared."""
    ceilings: list[Ceiling]
    rows: list[Row]
    is_complete: bool
    problems: list[str]
    """What was left out, and why; connectors that are not installed among them."""
    format: str = FORMAT

    def write(self, path: Path) -> None:
        """In one go: a reader sees the file before or after, never half of it."""
        draft = path.with_name(f".{path.name}.draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        draft.replace(path)


def read_report(path: Path) -> Report:
    """Raises UsageError where it is none."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise UsageError("report", str(path), error.strerror or str(error)) from None
    except msgspec.MsgspecError as error:
        raise UsageError(
            "report", str(path), f"is no report of kvxfer bench connectors: {error}"
        ) from None
    if found.format != FORMAT:
        raise UsageError("report", str(path), f"is of the format {found.format!r}, not {FORMAT!r}")
    return found


def is_report(path: Path) -> bool:
    """Whether it says that it is one; a file that cannot be read is told by who reads it."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(found, dict) and "format" in found
