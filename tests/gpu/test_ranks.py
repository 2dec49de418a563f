"""Two ranks on two GPUs, over NCCL: the tokens of one, with decode steps recorded as graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.comparing import BLOCK_SIZE, run
from support.models import HostEngine, host_views
from support.ranked import RankedEngine

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.table import BlockTable
from kvxfer.model import inspect_model
from kvxfer.model.groups import Place
from kvxfer.model.runner import ModelRunner, SequenceStep
from kvxfer.model.tiny import MODEL_DIR
from kvxfer.worker.ranked_runner import RankedRunner
from kvxfer.worker.ranks import RankGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="torch sees fewer than 2 CUDA devices"
    ),
]

PROMPTS = [list(b"To be"), list(b"KING. The night is long, and we have far to go; ")]
MAX_BATCH = 2


class GpuEngine(HostEngine):
    """The single process: the whole model on one GPU, over plain memory."""

    def __init__(self) -> None:
        self.runner = ModelRunner.load(inspect_model(MODEL_DIR), "cuda:0", "float32", 1)
        self.specs = self.runner.probe_specs(BLOCK_SIZE)
        self.views = [
            [view.cuda(0) for view in host_views(spec, KVCacheLayout.LBHNC, 64)[0]]
            for spec in self.specs
        ]


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    group = RankGroup(["cuda:0", "cuda:1"])
    try:
        yield group
    finally:
        group.close()


def test_tokens_are_those_of_one_gpu(group):
    engine = RankedEngine(group, MODEL_DIR, KVCacheLayout.LBHNC, 4096)
    group.extend([64])
    engine.runner.warm_up(64, MAX_BATCH)
    single = GpuEngine()
    expected = run(single, PROMPTS, batch=MAX_BATCH)
    group.extend([512])
    found = run(engine, PROMPTS, batch=MAX_BATCH)
    assert [one.answer for one in found] == [one.answer for one in expected]


def test_layers_are_told_of_before_the_chunk_is_done(group):
    """By the sums over NCCL; runs with the group that the test before has loaded."""
    host, told = group.host, []
    runner = RankedRunner(group)
    (spec,) = host.cache.geometry.specs
    tables = [BlockTable([1, 2, 3, 4, 5, 6, 7])]

    def tell(place: Place) -> None:
        behind = torch.cuda.Event()
        behind.record(torch.cuda.current_stream("cuda:0"))
        told.append((place, behind))

    group.call("erase_pattern", [1, 2, 3, 4, 5, 6, 7])
    runner.prefill_chunk(SequenceStep(PROMPTS[1], 0, tables), tell)
    assert [place for place, _ in told] == [Place(0, i) for i in range(spec.num_layers - 1)]
    assert all(behind.query() for _, behind in told)
    assert group.call("check_pattern", [1, 2, 3, 4, 5, 6, 7], 0) == [False, False]
