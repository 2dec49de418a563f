"""A model over all ranks of a group, to be used where one process has its ModelRunner.

All ranks run the same program, so the n-th sum over them comes at the same place in each. A sum is
done in one rank only when all have given their part, which each does after its earlier writes: what
rank 0 wrote before a sum that is done is written on every rank. On a GPU "done" is in the order of
the device: the sum waits for the writes before it, and what is recorded behind it waits for the
sum. So the ranks need not be asked how far they are, and no message is sent for it. (On the CPU
tested with a rank that is stopped meanwhile; on GPUs it is what torch says of streams and NCCL.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvxfer.errors import ModelError
from kvxfer.model.groups import Place
from kvxfer.model.packing import SequenceStep
from kvxfer.model.tensor_parallel import Ranks
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
        """`on_written` is told of a layer when it is written on all ranks, or what will have been
        when the device has done what rank 0 gave it: not of those after the last sum."""
        runner = self._group.host.runner
        told = on_written
        if on_written is not None and runner.ranks is not None:
            told = _OnAllRanks(runner.ranks, on_written)
        own = partial(runner.prefill_chunk, step, told)
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


class _OnAllRanks:
    """Called with each layer that rank 0 has written; tells of those that every rank has. In rank
    0's model thread, for one pass."""

    def __init__(self, ranks: Ranks, tell: Callable[[Place], None]) -> None:
        self._ranks = ranks
        self._tell = tell
        self._waiting: deque[tuple[int, Place]] = deque()
        """Layers, in order, with the number of sums before each."""

    def __call__(self, place: Place) -> None:
        done = self._ranks.num_totals
        while self._waiting and self._waiting[0][0] < done:
            self._tell(self._waiting.popleft()[1])
        self._waiting.append((done, place))


def _agreed(chosen: list[Any]) -> Any:
    for rank, tokens in enumerate(chosen):
        if tokens != chosen[0]:
            raise ModelError(f"rank 0 chooses {chosen[0]} where rank {rank} chooses {tokens}")
    return chosen[0]
