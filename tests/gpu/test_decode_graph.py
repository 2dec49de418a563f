"""Decode steps captured as CUDA graphs, over GPU memory that grows between the replays.

Run with TRITON_INTERPRET=0: in Triton's interpreter nothing can be captured.
"""

from __future__ import annotations

import pytest
import torch
from support.models import ENCODER_DECODERS, HostEngine, host_views, write_model
from torch.nn import functional

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import UnsupportedModel
from kvxfer.model import inspect_model
from kvxfer.model.decode_graph import CudaRecorder
from kvxfer.model.runner import ModelRunner, SequenceStep
from kvxfer.model.tiny import MODEL_DIR

pytest.importorskip("triton", reason="triton is not installed")

from kvxfer.model.paged_decode import is_interpreted, paged_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(is_interpreted(), reason="Triton's interpreter is on: TRITON_INTERPRET=0"),
]

BLOCK_SIZE = 16
CAPACITY = 8192
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def runner():
    """The bundled model in fp32, where two ways to the same token hardly ever tie."""
    runner = ModelRunner.load(inspect_model(MODEL_DIR), "cuda", "float32", 1)
    yield runner
    runner.close()


@pytest.fixture
def make_cache(runner):
    from kvxfer.memory.cuda import CudaDriver

    driver = CudaDriver()
    made = []

    def make(layout=KVCacheLayout.LBHNC, num_blocks=1):
        specs = runner.probe_specs(BLOCK_SIZE)
        geometry = CacheGeometry.build(specs, [layout], [CAPACITY], driver.granularity)
        cache = KVCache(driver, geometry)
        made.append(cache)
        cache.extend([num_blocks])
        return cache

    yield make
    torch.cuda.synchronize()
    for cache in made:
        cache.close()


def excerpt(count, length):
    """`count` prompts of different lengths from the bundled model's held-out text."""
    text = (MODEL_DIR / "excerpt.txt").read_bytes()
    return [list(text[i * length : (i + 1) * length - 7 * i]) for i in range(count)]


def engine_over(runner, cache):
    engine = HostEngine(runner, block_size=BLOCK_SIZE)
    engine.views = cache.views
    return engine


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_the_kernel_equals_sdpa(layout, dtype, window):
    name = str(dtype).removeprefix("torch.")
    spec = KVCacheSpec(2, 8, 128, 128, name, BLOCK_SIZE)
    lens = [0, 1, 129, 500, 2049, 4000]
    source = torch.Generator("cuda").manual_seed(0)
    num_blocks = sum(map(spec.num_blocks, lens)) + 1
    host = host_views(spec, layout, num_blocks)[0][1]
    view = host._base.cuda().as_strided(host.shape, host.stride(), host.storage_offset())
    order = (
        torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    ).tolist()
    # Entries that belong to no sequence point far outside of the view.
    tables = torch.full((len(lens), 512), 1 << 30, dtype=torch.int32)
    query = torch.randn(len(lens), 32, 128, device="cuda", dtype=dtype, generator=source)
    expected = torch.zeros(len(lens), 32, 128, device="cuda", dtype=torch.float64)
    for row, length in enumerate(lens):
        blocks = [order.pop() for _ in range(spec.num_blocks(length))]
        if not blocks:
            continue
        tables[row, : len(blocks)] = torch.tensor(blocks)
        tokens = torch.randn(
            8, len(blocks) * BLOCK_SIZE, 256, device="cuda", dtype=dtype, generator=source
        )
        tokens[:, length:] = float("nan")
        view[blocks] = tokens.unflatten(1, (len(blocks), BLOCK_SIZE)).transpose(0, 1)
        first = max(0, length - window) if window else 0
        seen = tokens[None, :, first:length].double().repeat_interleave(4, dim=1)
        one = query[row].double()[None, :, None]
        result = functional.scaled_dot_product_attention(one, seen[..., :128], seen[..., 128:])
        expected[row] = result[0, :, 0]
    lens_there = torch.tensor(lens, device="cuda")
    for splits in (None, 1, 32):
        found = paged_decode(
            query, view, 128, tables.cuda(), lens_there, 128**-0.5, window, None, splits
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_graphs_change_no_token(runner, make_cache):
    prompts = excerpt(5, 90)
    tables = [list(range(1 + 20 * i, 21 + 20 * i))[::-1] for i in range(5)]
    plain = engine_over(runner, make_cache(num_blocks=128))
    graphs = engine_over(runner, make_cache(KVCacheLayout.LHBNC, 128))
    expected, found = (
        [engine.prefill(p, t) for p, t in zip(prompts, tables, strict=True)]
        for engine in (plain, graphs)
    )
    runner.bind(plain.views)
    for batch in (1, 3, 5):
        plain.decode(expected[:batch], 24)
    runner.bind(graphs.views)
    assert runner.record_decode(5)
    for batch in (1, 3, 5):
        graphs.decode(found[:batch], 24)
    assert [s.tokens for s in found] == [s.tokens for s in expected]
    assert len({token for s in expected for token in s.answer}) > 8
    for a, b in zip(found, expected, strict=True):
        for kv_a, kv_b in zip(graphs.kv(a), plain.kv(b), strict=True):
            torch.testing.assert_close(kv_a, kv_b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_graphs_over_rings_and_several_groups_change_no_logit(tmp_path, family):
    """The window passes several times over each ring; unseen blocks are NaN."""
    info = inspect_model(write_model(tmp_path, family))
    runner = ModelRunner.load(info, "cuda", "float32", 1)
    engine = HostEngine(runner, block_size=BLOCK_SIZE)
    engine.views = [[view.cuda() for view in group] for group in engine.views]
    runner.bind(engine.views)
    for group in engine.views:
        for view in group:
            view[0] = 0
    assert runner.record_decode(3)
    prompts = excerpt(3, 60)
    sequences = [
        engine.prefill(p, list(range(1 + 9 * i, 9 + 9 * i))) for i, p in enumerate(prompts)
    ]
    for _ in range(40):
        steps = [engine.next_step(sequence) for sequence in sequences]
        replayed = runner.decode_logits(steps).clone()
        expected = runner.logits(steps)
        torch.testing.assert_close(replayed, expected, rtol=1e-3, atol=1e-3)
        for sequence, row in zip(sequences, expected, strict=True):
            sequence.tokens.append(int(row.argmax()))
    runner.close()


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_models_with_an_encoder_answer_as_on_the_cpu(tmp_path, family):
    info = inspect_model(write_model(tmp_path, family))
    prompt, found = excerpt(1, 60)[0], []
    for device in ("cpu", "cuda"):
        runner = ModelRunner.load(info, device, "float32", 1)
        engine = HostEngine(runner, block_size=BLOCK_SIZE)
        engine.views = [[view.to(device) for view in group] for group in engine.views]
        runner.bind(engine.views)
        runner.warm_up(64, max_batch=2)
        sequence = engine.prefill(prompt, [1, 2, 3, 4, 5])
        engine.decode([sequence], 12)
        found.append(sequence.answer)
        runner.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_what_was_captured_at_one_granule_replays_after_growth(runner, make_cache, layout):
    cache = make_cache(layout)
    (granule_blocks,) = cache.committed_blocks
    runner.bind(cache.views)
    runner.warm_up(64, max_batch=4)
    assert cache.committed_blocks == (granule_blocks,), "captured with one granule per segment"
    for grown in (3 * granule_blocks + 15, 5 * granule_blocks + 15):
        assert cache.extend([grown]).chunks
        steps = []
        for i, prompt in enumerate(excerpt(3, 70)):
            blocks = [grown - 1 - i, grown - 10 + i, grown - 4 - i, granule_blocks + i, 1 + i]
            tables = [BlockTable(blocks)]
            runner.prefill_chunk(SequenceStep(prompt, 0, tables))
            steps.append(SequenceStep([101], len(prompt), tables))
        replayed = runner.decode_logits(steps).clone()
        expected = runner.logits(steps)
        assert torch.isfinite(replayed).all()
        torch.testing.assert_close(replayed, expected, rtol=1e-3, atol=1e-3)
        assert runner.decode_step(steps) == expected.argmax(-1).tolist()


def test_the_memory_that_graphs_take_shows_and_comes_back(runner, make_cache):
    cache, other = make_cache(num_blocks=64), make_cache(num_blocks=64)
    runner.bind(cache.views)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert runner.record_decode(16)
    torch.cuda.empty_cache()
    recorded = torch.cuda.memory_reserved()
    assert recorded > before
    runner.bind(other.views)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < recorded


def test_work_that_waits_for_the_gpu_is_refused_before_it_is_captured():
    device = torch.device("cuda", torch.cuda.current_device())
    record = CudaRecorder(device)
    value = torch.ones(1, device=device)
    with pytest.raises(UnsupportedModel, match="waits for the GPU"):
        record(lambda: value.mul_(value.item()))
    assert torch.cuda.get_sync_debug_mode() == 0
    replay = record(lambda: value.add_(1))
    value.fill_(5)
    replay()
    assert value.item() == 6
