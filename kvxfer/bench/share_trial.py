"""The measuring process of `kvxfer bench share`: sizes tried, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.bench.scratch import is_out_of_memory, release_unused
from kvxfer.bench.service_engine import ServiceSetup, Serving, start_growable
from kvxfer.bench.share import SHARE_BAR, ShareOptions
from kvxfer.errors import KvxferError

MIB, GIB = 1 << 20, 1 << 30
FIRST_STEP = 4
"""Of the resolution: the search begins with so much more than was measured."""


def largest_surviving(
    low: int, limit: int, resolution: int, survives: Callable[[int], bool]
) -> int:
    """The largest of [low, limit] that survives, to within `resolution`; `low` is known to.

    Steps that double, then bisection: what is far too large is never tried. Of two sizes the
    smaller must survive if the larger does.
    """
    step, high = FIRST_STEP * resolution, limit + 1
    while low < limit and high > limit:
        wanted = min(limit, low + step)
        if survives(wanted):
            low, step = wanted, 2 * step
        else:
            high = wanted
    while high - low > resolution and high <= limit:
        middle = (low + high) // 2
        if survives(middle):
            low = middle
        else:
            high = middle
    return low


def measure_share(options: ShareOptions, setup: ServiceSetup) -> int:
    """In the measuring process: start, bisect, keep the figures."""
    record = Record(options.json, command_line("share", options))
    with ExitStack() as undo:
        serving = start_growable(setup, undo)
        record.machine = describe_machine(setup.device)
        trial = Trial(serving, setup.device)
        if trial.expected is None:
            _add(record, "share_measured_size_survives", 0.0, "0/1", 1.0)
            raise KvxferError("the load does not run with the cache that was measured for it")
        _add(record, "share_measured_size_survives", 1.0, "0/1", 1.0)
        low = trial.measured_blocks
        block = serving.engine.specs[0].block_bytes
        high = trial.most_blocks(int(options.most_gib * GIB))
        print(f"up to {(high - low) * block / MIB:.0f} MiB more are tried", flush=True)
        resolution = max(1, options.resolution_mib * MIB // block)
        largest = trial.bytes_with(largest_surviving(low, high, resolution, trial.survives))
        measured = trial.bytes_with(low)
        _add(record, "share_measured_kv", measured / GIB, "GiB")
        _add(record, "share_largest_surviving_kv", largest / GIB, "GiB")
        _add(record, "share_of_largest_surviving_kv", measured / largest, "1", SHARE_BAR)
        _add(record, "share_outputs_equal", float(trial.all_equal), "0/1", 1.0)
    return record.exit_code


def _add(record: Record, metric: str, value: float, unit: str, bar: float | None = None) -> None:
    record.add(Figure(metric, value, unit, bar, "higher", 1, 0.0))


class Trial:
    """Tries sizes of one serving engine's cache; the first group is what grows beyond the rest."""

    def __init__(self, serving: Serving, device: str) -> None:
        self._serving = serving
        self._device = device
        self._cache = serving.engine.cache
        self._measured = self._cache.committed_blocks
        self.all_equal = True
        """Whether every run that survived generated the same tokens."""
        self.expected = self._tokens()
        """Of the measured size; None: the load does not run with it."""

    @property
    def measured_blocks(self) -> int:
        return self._measured[0]

    def most_blocks(self, most_bytes: int) -> int:
        """The most that could be committed if nothing else wanted memory; of `most_bytes` beyond
        the measured size (0: of any number)."""
        release_unused(self._device)
        group = self._cache.geometry.groups[0]
        free = self._serving.engine.driver.memory_info().free_bytes
        more = min(free, most_bytes or free) // group.spec.block_bytes
        return min(group.capacity_blocks, self.measured_blocks + more)

    def bytes_with(self, num_blocks: int) -> int:
        return self._cache.geometry.bytes_of((num_blocks, *self._measured[1:]))

    def survives(self, num_blocks: int) -> bool:
        """Whether the load runs with so many blocks. The measured ones and what is in them stay:
        only what lies above goes, at a chunk's edge."""
        start = time.monotonic()
        self._cache.shrink(self._measured)
        release_unused(self._device)
        tokens = self._tokens(num_blocks)
        if tokens is not None:
            self.all_equal = self.all_equal and tokens == self.expected
        size = self.bytes_with(num_blocks) / GIB
        verdict = "runs" if tokens is not None else "does not run"
        took = time.monotonic() - start
        print(f"{size:.3f} GiB of KV: the load {verdict} ({took:.1f} s)", flush=True)
        return tokens is not None

    def _tokens(self, num_blocks: int = 0) -> list[list[int]] | None:
        try:
            if num_blocks:
                self._cache.extend((num_blocks, *self._measured[1:]))
            return self._serving.service.run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            print(f"  {str(error).splitlines()[0]}", flush=True)
            return None
