"""Which layers of a chunk may travel while later ones are computed.

On a GPU the model thread is ahead of the device: a layer's KV is there once an event recorded
behind its writes is. The transfer thread asks for that, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvxfer.cache.footprint import has_encoder
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.model.groups import Place
from kvxfer.model.packing import SequenceStep
from kvxfer.worker.assembly import WorkerParts

Written = tuple[int, ...]
"""How many layers of each group, from the first on, are there."""


class LayerStreamer:
    """Made by the control thread; what `prefill` returns runs in the model thread."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._specs = parts.engine.specs

    def prefill(
        self, step: SequenceStep, written: Callable[[Written], None]
    ) -> Callable[[], int | None]:
        """Computes a chunk; `written` is called in the control thread, perhaps several times, of
        what is there in all ranks."""
        runner = self._parts.engine.runner
        every = layers_at_once(self._specs, len(step.tokens), self._parts.options.kv_stream_bytes)
        if every == sum(spec.num_layers for spec in self._specs):
            return partial(runner.prefill_chunk, step)
        return lambda: runner.prefill_chunk(step, self._teller(every, written))

    def _teller(self, every: int, written: Callable[[Written], None]) -> Callable[[Place], None]:
        """For one run of a chunk: a step that is tried again begins anew."""
        counts = [0] * len(self._specs)
        total = sum(spec.num_layers for spec in self._specs)

        def tell(place: Place) -> None:
            counts[place.group] = place.index + 1
            done = sum(counts)
            if done % every == 0 and done < total:
                is_there = self._parts.engine.mark()
                self._parts.transfer.when(is_there, partial(written, tuple(counts)))

        return tell


def layers_at_once(specs: Sequence[KVCacheSpec], num_tokens: int, least_bytes: int) -> int:
    """After how many layers, counted over all groups, KV is handed over. An encoder's is whole."""
    total = sum(spec.num_layers for spec in specs)
    if has_encoder(specs):
        return total
    num_bytes = sum(spec.block_bytes // spec.block_size for spec in specs) * num_tokens
    pieces = max(1, min(total, num_bytes // least_bytes))
    return -(-total // pieces)
