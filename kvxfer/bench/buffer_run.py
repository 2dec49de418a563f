"""The measuring of `kvxfer bench buffer`: a long run, a fit, and the fit tried."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import torch

from kvxfer.bench.buffer import BufferOptions
from kvxfer.bench.buffer_plot import CONSTANT, plot
from kvxfer.bench.memory_watch import MIB, MemoryWatch, SampleLog
from kvxfer.bench.mixed_load import MixedLoad
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.bench.scratch import is_out_of_memory, release_unused, use_device
from kvxfer.bench.service_engine import ServiceSetup, Serving, start_growable
from kvxfer.errors import ModelError

SAMPLE_S, REPORT_S = 1.0, 30.0


def measure_buffer(options: BufferOptions, setup: ServiceSetup) -> int:
    """Measure, print, write; 1 when a bar was missed."""
    device = setup.device
    use_device(device)
    watch = MemoryWatch(device)
    record = Record(options.json, command_line("buffer", options))
    record.machine = describe_machine(device)
    with ExitStack() as undo:
        serving = start_growable(setup, undo, options.spare)
        run = _BufferRun(options, serving, watch, record, device)
        run.go_long()
        run.confirm()
    return record.exit_code


class _BufferRun:
    def __init__(
        self,
        options: BufferOptions,
        serving: Serving,
        watch: MemoryWatch,
        record: Record,
        device: str,
    ) -> None:
        self._options = options
        self._watch = watch
        self._record = record
        self._device = device
        self._engine = serving.engine
        peak = serving.engine.account.warm_up.peak
        baseline = watch.baseline(serving.engine.cache.committed_bytes, peak)
        path = None if options.json is None else options.json.with_suffix(".jsonl")
        self.log = SampleLog(path, baseline)
        dtype: torch.dtype = getattr(torch, serving.engine.specs[0].dtype)
        self._load = MixedLoad(serving.service, dtype, device)
        self._first_operations = 0
        self._first_digest = ""

    def go_long(self) -> None:
        """The long run; samples and figures are kept as it goes."""
        watch, load = self._watch, self._load
        next_sample, next_report = SAMPLE_S, REPORT_S
        while watch.elapsed_s < 60 * self._options.minutes:
            load.operation()
            watch.note(self._engine.cache.committed_bytes)
            if not self._first_digest and watch.elapsed_s >= self._options.confirm_s:
                self._remember_beginning()
            if watch.elapsed_s >= next_sample:
                self.log.add(watch.sample(load.operations))
                next_sample = watch.elapsed_s + SAMPLE_S
            if watch.elapsed_s >= next_report:
                self._report()
                next_report = watch.elapsed_s + REPORT_S
        self.log.add(watch.sample(load.operations))
        if not self._first_digest:
            self._remember_beginning()
        self._report()
        self._plot()

    def confirm(self) -> None:
        """The load's beginning again, at ever smaller fractions of the peak, until one fails."""
        fit = self.log.fit
        fractions = {fit.fraction, fit.allocated_fraction, 0.0}
        if fit.fraction > CONSTANT:
            fractions.add(CONSTANT)
        for fraction in sorted(fractions, reverse=True):
            is_fitted = fraction == fit.fraction
            is_confirmed = self._runs_with(fraction)
            if is_fitted:
                self._add("buffer_fitted_fraction_confirmed", float(is_confirmed), "0/1", 1.0)
            if not is_confirmed:
                return
            self._add("buffer_least_fraction_confirmed", fraction, "of the peak", None, "lower")

    def _remember_beginning(self) -> None:
        self._first_operations, self._first_digest = self._load.operations, self._load.digest

    def _report(self) -> None:
        fit, minutes = self.log.fit, self._watch.elapsed_s / 60
        print(f"{minutes:.1f} minutes, {self._load.operations} operations", flush=True)
        self._add("buffer_minutes", minutes, "minutes")
        self._add("buffer_operations", self._load.operations, "operations")
        self._add("buffer_transient_peak", fit.headroom / MIB, "MiB", None, "lower")
        self._add("buffer_worst_excursion", fit.growth / MIB, "MiB", None, "lower")
        self._add("buffer_fitted_fraction", fit.fraction, "of the peak", None, "lower")
        fraction = fit.allocated_fraction
        self._add("buffer_fitted_fraction_in_tensors", fraction, "of the peak", None, "lower")

    def _runs_with(self, fraction: float) -> bool:
        """Whether the beginning runs, and says the same, with a cache that leaves only so much of
        the peak free beside what warm-up measured."""
        cache, fit, engine = self._engine.cache, self.log.fit, self._engine
        release_unused(self._device)
        wanted = engine.account.available - self.log.baseline.used - int(fraction * fit.headroom)
        group = cache.geometry.groups[0]
        others = cache.geometry.bytes_of((0, *cache.committed_blocks[1:]))
        blocks = min(group.capacity_blocks, (wanted - others) // group.spec.block_bytes)
        try:
            cache.extend((max(blocks, cache.committed_blocks[0]), *cache.committed_blocks[1:]))
            self._load.restart()
            for _ in range(self._first_operations):
                self._load.operation()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            print(f"fraction {fraction:.4f}: {str(error).splitlines()[0]}", flush=True)
            return False
        if self._load.digest != self._first_digest:
            raise ModelError(f"with {fraction:.4f} of the peak free the same load says other words")
        size = cache.committed_bytes / MIB
        print(f"fraction {fraction:.4f}: runs beside {size:.0f} MiB of KV", flush=True)
        return True

    def _plot(self) -> None:
        path = self._options.plot
        if path is None and self._options.json is not None:
            path = self._options.json.with_suffix(".svg")
        if path is not None:
            print(plot(self.log, path) or f"wrote {path}", flush=True)

    def _add(
        self,
        metric: str,
        value: float,
        unit: str,
        bar: float | None = None,
        better: Literal["higher", "lower"] = "higher",
    ) -> None:
        self._record.add(Figure(metric, value, unit, bar, better, 1, 0.0))
