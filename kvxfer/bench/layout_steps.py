"""Decode steps over equal KV in each of the six layouts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from kvxfer.bench.layouts import LayoutsOptions
from kvxfer.bench.scratch import driver_of, open_cache, use_device
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import UsageError
from kvxfer.model.loader import inspect_model, load_model
from kvxfer.model.runner import ModelRunner, SequenceStep

CHAIN = 4
"""Steps, each fed with the last one's tokens, whose tokens and logits are compared."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether all layouts gave the same."""

    tokens: bool
    logits: bool
    """Bit for bit."""
    largest_difference: float
    """Of two logits of the same token."""

    def describe(self) -> str:
        tokens = "identical tokens" if self.tokens else "TOKENS THAT DIFFER"
        if self.logits:
            return f"{tokens} from bit-identical logits in all layouts"
        return f"{tokens} from logits that differ by up to {self.largest_difference:.3g}"


class LayoutSteps:
    """One model, six runners, six caches. A context manager: its end closes them."""

    def __init__(self, model: Path, device: str, options: LayoutsOptions) -> None:
        self._options = options
        self._device = device
        self._undo = ExitStack()
        use_device(device)
        torch.set_num_threads(options.threads)
        info = inspect_model(model)
        longest = max(options.contexts)
        if longest > info.max_model_len:
            raise UsageError("contexts", longest, f"the model takes {info.max_model_len} tokens")
        weights = load_model(info, device, None)
        self._source = random.Random(0)
        self._runners = {
            layout: ModelRunner(info, weights, torch.device(device)) for layout in KVCacheLayout
        }
        for runner in self._runners.values():
            self._undo.callback(runner.close)
        with self._undo.pop_all() as undo:  # closed at once if what follows fails
            self._fill(longest, undo)
            self._undo = undo.pop_all()
        self._first = [self._source.randrange(info.vocab_size) for _ in range(options.batch)]

    def __enter__(self) -> LayoutSteps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def agreement(self, context: int) -> Agreement:
        """A chain of steps up to `context` tokens in each layout, compared."""
        chains = [self._chain(runner, context) for runner in self._runners.values()]
        tokens, logits = chains[0]
        differences = [
            float((ours.float() - theirs.float()).abs().max())
            for _, others in chains
            for ours, theirs in zip(logits, others, strict=True)
        ]
        return Agreement(
            tokens=all(other == tokens for other, _ in chains),
            logits=all(
                torch.equal(ours, theirs)
                for _, others in chains
                for ours, theirs in zip(logits, others, strict=True)
            ),
            largest_difference=max(differences),
        )

    def times_ms(self, context: int, warm_up: int, rounds: int) -> dict[str, list[float]]:
        """By layout, the time of each of `rounds` steps: the same step again and again, whose
        sequences are `context` tokens long with its own."""
        steps = self._steps(self._first, context - 1)
        times: dict[str, list[float]] = {layout: [] for layout in self._runners}
        for number in range(warm_up + rounds):
            for layout, runner in self._runners.items():
                start = time.perf_counter()
                runner.decode_step(steps)
                took = time.perf_counter() - start
                if number >= warm_up:
                    times[layout].append(took * 1e3)
        return times

    def _chain(
        self, runner: ModelRunner, context: int
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        tokens, logits = [self._first], []
        for position in range(context - CHAIN, context):
            found = runner.decode_logits(self._steps(tokens[-1], position))
            logits.append(found.cpu())
            tokens.append(found.argmax(-1).tolist())
        return tokens[1:], logits

    def _steps(self, tokens: Sequence[int], position: int) -> list[SequenceStep]:
        pairs = zip(tokens, self._tables, strict=True)
        return [SequenceStep([token], position, table) for token, table in pairs]

    def _fill(self, longest: int, undo: ExitStack) -> None:
        """The caches, their KV, and the recorded steps."""
        options = self._options
        first = self._runners[KVCacheLayout.LBHNC]
        specs = first.probe_specs(options.block_size)
        held = [spec.blocks_held(longest, 1) for spec in specs]
        needed = [1 + options.batch * blocks for blocks in held]
        self._tables = self._shuffled(held, needed)
        driver = driver_of(self._device)
        caches = []
        for layout, runner in self._runners.items():
            runner.probe_specs(options.block_size)
            caches.append(open_cache(driver, specs, layout, needed, undo))
            runner.bind(caches[-1].views)
            print(f"{layout}: {caches[-1].committed_bytes >> 20} MiB of KV", flush=True)
        _fill_alike(caches, specs)
        if self._device != "cpu":
            for runner in self._runners.values():
                runner.record_decode(options.batch)

    def _shuffled(self, held: Sequence[int], needed: Sequence[int]) -> list[list[BlockTable]]:
        """One list for each sequence; blocks in no order, as after some time of service."""
        by_group = []
        for per_sequence, blocks in zip(held, needed, strict=True):
            ids = list(range(1, blocks))
            self._source.shuffle(ids)
            starts = range(0, len(ids), per_sequence)
            by_group.append([BlockTable(ids[start : start + per_sequence]) for start in starts])
        return [list(tables) for tables in zip(*by_group, strict=True)]


def _fill_alike(caches: Sequence[KVCache], specs: Sequence[KVCacheSpec]) -> None:
    """The same normally distributed KV in every cache, a layer at a time."""
    device = caches[0].buffer.device
    source = torch.Generator(device).manual_seed(0)
    for group in range(len(specs)):
        for layer in range(specs[group].num_layers):
            views = [cache.views[group][layer] for cache in caches]
            values = torch.empty(views[0].shape, dtype=views[0].dtype, device=device)
            values.normal_(generator=source)
            for view in views:
                view.copy_(values)
