"""How many bytes of KV a worker may hold: measured after warm-up, in an account that adds up.

Constants and rule: the extensible-KV-cache design (vLLM's draft #50779), rows S9–S11 of our
reference: buffer = max(150 MiB, 20 % of the transient peak headroom, 2 % of available), at most
10 % of available; never below zero; when the measurement says that nothing is left, the size
that warm-up proved is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes. `available` − `used` − `buffer` = `kv`, unless the guard kept the proved size."""

    available: int
    """What this worker may use in all: its budget, or what was free when it started."""
    used: int
    """Taken by weights, libraries, connectors and warm-up, KV excluded."""
    buffer: int
    kv: int
    guarded: bool = False
    """Nothing was left by the measurement; `kv` is what warm-up ran with."""

    def lines(self) -> list[str]:
        """The account as a reader adds it up."""
        rows = [("available", self.available), ("- used", self.used), ("- buffer", self.buffer)]
        text = [f"{name:<12}{value / MIB:>12.1f} MiB" for name, value in rows]
        text.append(f"{'= KV cache':<12}{self.kv / MIB:>12.1f} MiB")
        if self.guarded:
            text.append("(nothing was left by the measurement: the warm-up size is kept)")
        return text


def growth_buffer(available: int, peak_headroom: int) -> int:
    """The margin kept free, in bytes."""
    wanted = max(150 * MIB, peak_headroom // 5, available // 50)
    return min(wanted, available // 10)


def account_after_warm_up(
    available: int, used: int, peak_headroom: int, proved_kv: int
) -> MemoryAccount:
    """Size the cache. `peak_headroom`: the most that warm-up held for a moment above `used`."""
    buffer = growth_buffer(available, peak_headroom)
    kv = available - used - buffer
    if kv < proved_kv:
        return MemoryAccount(available, used, buffer, proved_kv, guarded=True)
    return MemoryAccount(available, used, buffer, kv)
