"""What a process holds besides its KV cache, watched over time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was held when warm-up was measured; bytes."""

    used: int
    """By the process, without its KV: on a GPU torch's unused memory is among it."""
    allocated_peak: int
    """The most that was in tensors at any moment of warm-up."""
    headroom: int
    """The transient peak: `allocated_peak` less what was still in tensors at the end."""
    kv: int
    """Committed while the load ran."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The worst of one interval; bytes."""

    at_s: float
    """Its end, after the load began."""
    used: int
    allocated_peak: int
    operations: int
    """Done since the load began."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The smallest fractions of the headroom that cover what was seen."""

    growth: int
    """The most that `used` came to beyond the baseline, in bytes."""
    allocated_growth: int
    """The same of what was in tensors, which torch's caching cannot inflate."""
    headroom: int

    @property
    def fraction(self) -> float:
        return self.growth / max(1, self.headroom)

    @property
    def allocated_fraction(self) -> float:
        return self.allocated_growth / max(1, self.headroom)


def fit(baseline: Baseline, samples: Iterable[Sample]) -> Fit:
    """buffer = fraction · headroom must cover the growth of what is held besides the KV."""
    used = allocated = 0
    for sample in samples:
        used = max(used, sample.used - baseline.used)
        allocated = max(allocated, sample.allocated_peak - baseline.allocated_peak)
    return Fit(used, allocated, baseline.headroom)


class SampleLog:
    """Samples as JSON lines, the baseline first; each is on disk when `add` returns."""

    def __init__(self, path: Path | None, baseline: Baseline) -> None:
        self.baseline = baseline
        self.samples: list[Sample] = []
        self._path = path
        if path is not None:
            path.write_text(json.dumps(asdict(baseline)) + "\n")

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(sample)) + "\n")

    @property
    def fit(self) -> Fit:
        return fit(self.baseline, self.samples)


def read_log(path: Path) -> SampleLog:
    """What a SampleLog wrote; it is not written to again. Raises OSError, ValueError."""
    first, *rest = path.read_text().splitlines()
    log = SampleLog(None, Baseline(**json.loads(first)))
    for line in rest:
        log.add(Sample(**json.loads(line)))
    return log


class MemoryWatch:
    """Measures this process on one device. Made before anything large is allocated there."""

    def __init__(self, device: str) -> None:
        from kvxfer.bench.scratch import driver_of
        from kvxfer.memory.usage import UsageMeter

        self._device = device
        self._meter = UsageMeter(driver_of(device))
        self._start_s = time.monotonic()
        self._used = self._peak = 0

    def baseline(self, kv_bytes: int, headroom: int) -> Baseline:
        """What is held now; time begins now."""
        used, peak = self._measure(kv_bytes)
        self._start_s, self._used, self._peak = time.monotonic(), 0, 0
        return Baseline(used, peak, headroom, kv_bytes)

    def note(self, kv_bytes: int) -> None:
        """Look once more; `kv_bytes` are committed."""
        used, peak = self._measure(kv_bytes)
        self._used, self._peak = max(self._used, used), max(self._peak, peak)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def sample(self, operations: int) -> Sample:
        """The worst noted since the last sample."""
        found = Sample(self.elapsed_s, self._used, self._peak, operations)
        self._used = self._peak = 0
        return found

    def _measure(self, kv_bytes: int) -> tuple[int, int]:
        used = self._meter.used_bytes(kv_bytes)
        if self._device == "cpu":
            return used, used  # there is nothing between the process's memory and its tensors'
        import torch

        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return used, peak
