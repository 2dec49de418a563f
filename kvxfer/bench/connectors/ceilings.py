"""What the machine itself can do, measured in turn with what the connectors do.

memcpy: one thread's contiguous copy; device copy: the copy engines' between GPUs, or within one;
host-device copy: theirs between host and GPU; socket: a plain TCP stream between the two processes.
Each of as many bytes as a transfer moves: small copies stay in caches, and large ones do not.
"""

from __future__ import annotations

from kvxfer.bench.connectors.pair import ConnectorsPair
from kvxfer.bench.connectors.report import Ceiling
from kvxfer.bench.connectors.summary import spread_of
from kvxfer.bench.connectors.sweep import Trial
from kvxfer.bench.connectors.values import size_text

STREAM_RUNS = 5
"""Of the socket on one machine, once for each size, after one that is not measured."""


class Ceilings:
    """All samples of a run, by name. `is_far`: between two machines the socket is the ceiling."""

    def __init__(self, *, is_far: bool) -> None:
        self._is_far = is_far
        self._gbps: dict[str, list[float]] = {}

    def name_of(self, trial: Trial) -> str:
        """The one that `trial` is compared with."""
        if self._is_far:
            return _named("socket", trial)
        gpus = sum(device != "cpu" for device in trial.setting.devices)
        return _named(("memcpy", "host-device copy", "device copy")[gpus], trial)

    def take(self, pair: ConnectorsPair, trial: Trial) -> float:
        """GB/s of one more run of it."""
        size = trial.size_bytes
        seconds = pair.stream(size) if self._is_far else pair.gauge(trial.direction, size)
        return size / seconds / 1e9

    def keep(self, name: str, gbps: float) -> None:
        self._gbps.setdefault(name, []).append(gbps)

    def measure_socket(self, pair: ConnectorsPair, trial: Trial) -> None:
        """Where `take` does not, for each size once."""
        name = _named("socket", trial)
        if self._is_far or name in self._gbps:
            return
        pair.stream(trial.size_bytes)
        for _ in range(STREAM_RUNS):
            self.keep(name, trial.size_bytes / pair.stream(trial.size_bytes) / 1e9)

    @property
    def all(self) -> list[Ceiling]:
        return [Ceiling(name, spread_of(gbps)) for name, gbps in self._gbps.items()]


def _named(what: str, trial: Trial) -> str:
    return f"{what} of {size_text(trial.size_bytes)}"
