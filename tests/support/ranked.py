"""Several ranks of one model: in a group's processes, or side by side with this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from support.comparing import BLOCK_SIZE, block_lists, run
from support.models import HostEngine

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.model import inspect_model
from kvxfer.model.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    import torch

    from kvxfer.worker.ranks import RankGroup

SIZE = 2
PROMPTS = [[72, 101, 108, 108, 111], [7 * i % 256 for i in range(45)]]
"""One shorter than a block, one longer than a chunk."""


class RankedEngine(HostEngine):
    """A group over its ranks' caches, driven as a single process is."""

    def __init__(
        self, group: RankGroup, model: Path, layout: KVCacheLayout, capacity_blocks: int
    ) -> None:
        """Loads and reserves; `views` are those of rank 0."""
        from kvxfer.worker.ranked_runner import RankedRunner

        class Bound(RankedRunner):
            def bind(self, views: Sequence[Sequence[torch.Tensor]]) -> None:
                """Every rank is bound to its own cache already."""

        group.call("load", str(model), "float32", 1)
        self.specs = group.call("probe_specs", BLOCK_SIZE)[0]
        capacities = [capacity_blocks] * len(self.specs)
        group.call("reserve", [layout] * len(self.specs), capacities)
        self.runner = Bound(group)
        self.views = group.host.cache.views


def answers(engine: HostEngine) -> tuple[list[list[int]], torch.Tensor]:
    """What an engine says to PROMPTS, and the logits after the second one."""
    import torch

    from kvxfer.model.runner import SequenceStep

    said = [sequence.answer for sequence in run(engine, PROMPTS, batch=2)]
    tables = engine.tables(block_lists(PROMPTS)[1], len(PROMPTS[1]))
    logits = engine.runner.logits([SequenceStep(PROMPTS[1], 0, tables)])
    return said, torch.as_tensor(logits)


def answers_of_rank(rank: int, model: Path, rendezvous: Path) -> tuple[HostEngine, list, object]:
    """Load a rank's part and say what it says; the engine's runner is closed."""
    from kvxfer.model.runner import ModelRunner

    place = TensorParallel(rank, SIZE, rendezvous.absolute())
    runner = ModelRunner.load(inspect_model(model), "cpu", "float32", 1, place)
    try:
        engine = HostEngine(runner, block_size=BLOCK_SIZE)
        said, logits = answers(engine)
    finally:
        runner.close()
    return engine, said, logits


def main() -> None:
    """Rank 1 of each model directory given, one after the other; its answers to stdout."""
    for directory in map(Path, sys.argv[1:]):
        _, said, _ = answers_of_rank(1, directory, directory / "rendezvous")
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
