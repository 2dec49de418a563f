"""How many bytes of KV a worker may hold: measured after warm-up, in an account that adds up.

Constants and rules are those of vLLM's extensible-KV-cache design (its draft #50779), rows S9–S14
of our reference. Growable: what is left after warm-up, less a buffer of max(150 MiB, 20 % of the
transient peak headroom, 2 % of available), at most 10 % of available. Not growable: the share of
the device's memory that the utilisation allows, less the peak of a profiling run.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError

MIB = 1 << 20
EXTENSIBLE_UTILIZATION = 1.0
FIXED_UTILIZATION = 0.92
"""vLLM's `gpu_memory_utilization` where the size is an estimate."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What the options come to on this device; decided once, before anything is allocated."""

    extensible: bool
    utilization: float
    utilization_given: bool
    """Whether the user asked for it; a default assumes that the device is the worker's alone."""
    reason: str
    """Why the cache is growable, or why not."""


def resolve_policy(
    enable: bool | None, utilization: float | None, elastic: bool, cannot: str
) -> MemoryPolicy:
    """`cannot` says why this device has no virtual-memory driver; '' if it has one.

    Unspecified (None) options move together: growable with utilisation 1.0, else 0.92. Raises
    UsageError for options that contradict each other or the device.
    """
    if utilization is not None and not 0 < utilization <= 1:
        raise UsageError("gpu_memory_utilization", utilization, "must be in (0, 1]")
    if enable and cannot:
        raise UsageError("enable_extensible_kv_cache", enable, cannot)
    extensible = not cannot if enable is None else enable
    if elastic and not extensible:
        why = cannot or "the cache was asked not to be extensible"
        raise UsageError("kv_commit", "elastic", f"needs an extensible KV cache: {why}")
    given = utilization is not None
    default = EXTENSIBLE_UTILIZATION if extensible else FIXED_UTILIZATION
    if extensible:
        reason = "the driver can" if enable is None else "asked for"
    else:
        reason = cannot or "switched off"
    return MemoryPolicy(extensible, utilization or default, given, reason)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What warm-up was measured to hold, in bytes, the KV cache excluded."""

    weights: int
    transfer: int
    """Connectors: agents, rings, kernels."""
    graphs: int
    """Captured graphs, workspaces and whatever else stayed."""
    peak: int
    """The most that was held for a moment beyond what stayed."""
    hooks: tuple[tuple[str, int], ...] = ()
    """What stayed of each warm-up hook, by its name: whatever else will allocate in service."""

    @property
    def used(self) -> int:
        return self.weights + self.transfer + self.graphs + sum(size for _, size in self.hooks)


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes. `available` − weights − transfer − graphs − hooks − pinned − `buffer` = `kv`, unless
    the user gave `kv` or the guard kept the size that warm-up proved."""

    available: int
    """What this worker may use in all."""
    warm_up: WarmUp
    pinned_by_peers: int
    """Revoked, but not unmapped while a peer may still touch it."""
    buffer: int
    kv: int
    note: str = ""
    """Why `kv` is not the sum, if it is not."""

    def lines(self) -> list[str]:
        """The account as a reader adds it up."""
        taken = self.warm_up
        rows = [
            ("  available", self.available),
            ("- weights", taken.weights),
            ("- transfer", taken.transfer),
            ("- graphs, workspaces", taken.graphs),
            *((f"- {name}", size) for name, size in taken.hooks),
            ("- pinned by peers", self.pinned_by_peers),
            (f"- buffer (peak {taken.peak / MIB:.0f} MiB)", self.buffer),
            ("= KV cache", self.kv),
        ]
        text = [f"{name:<28}{value / MIB:>12.1f} MiB" for name, value in rows]
        return [*text, f"({self.note})"] if self.note else text


def growth_buffer(available: int, peak: int) -> int:
    """The margin kept free, in bytes."""
    wanted = max(150 * MIB, peak // 5, available // 50)
    return min(wanted, available // 10)


def account_after_warm_up(
    available: int, warm_up: WarmUp, proved_kv: int, pinned_by_peers: int = 0
) -> MemoryAccount:
    """Size a growable cache. `proved_kv` bytes were committed while warm-up ran (S11's guard)."""
    buffer = growth_buffer(available, warm_up.peak)
    kv = available - warm_up.used - pinned_by_peers - buffer
    note = ""
    if kv < proved_kv:
        kv, note = proved_kv, "nothing was left by the measurement: the warm-up size is kept"
    return MemoryAccount(available, warm_up, pinned_by_peers, buffer, kv, note)


def account_as_given(available: int, warm_up: WarmUp, kv_bytes: int) -> MemoryAccount:
    """An explicit size is taken at its word and not derived again (S9)."""
    return MemoryAccount(available, warm_up, 0, 0, kv_bytes, "as given by kv_cache_memory_bytes")


def account_by_estimate(available: int, profiled: WarmUp) -> MemoryAccount:
    """Size a fixed cache, before graphs are captured: the peak of the profiling run is all that is
    known, and what comes after it must fit in what the utilisation left over."""
    kv = max(0, available - profiled.used - profiled.peak)
    return MemoryAccount(available, profiled, 0, 0, kv, "an estimate: the peak is kept free, too")
