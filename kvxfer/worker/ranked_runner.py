"""A model over all ranks of a group, to be used where one process has its ModelRunner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvxfer.errors import ModelError
from kvxfer.model.groups import Place
from kvxfer.model.packing import SequenceStep
from kvxfer.worker.ranks import RankGroup


class RankedRunner:
    """Steps as ModelRunner's, on every rank over its own heads. Used by one thread; the group has
    loaded a model and reserved its caches.

    Raises as `RankGroup.call`, and ModelError when two ranks choose different tokens: they compute
    from the same sums, so one of them has computed something else.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def prefill_chunk(
        self, step: SequenceStep, on_written: Callable[[Place], None] | None = None
    ) -> int | None:
        """`on_written` is told of rank 0's layers."""
        own = partial(self._group.host.runner.prefill_chunk, step, on_written)
        token: int | None = _agreed(self._group.call("prefill_chunk", step, own=own))
        return token

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        tokens: list[int] = _agreed(self._group.call("decode_step", list(steps)))
        return tokens

    def warm_up(self, max_tokens: int, max_batch: int, max_context: int | None = None) -> None:
        self._group.call("warm_up", max_tokens, max_batch, max_context)

    def close(self) -> None:
        """End the group, with all that its ranks have."""
        self._group.close()


def _agreed(chosen: list[Any]) -> Any:
    for rank, tokens in enumerate(chosen):
        if tokens != chosen[0]:
            raise ModelError(f"rank 0 chooses {chosen[0]} where rank {rank} chooses {tokens}")
    return chosen[0]
