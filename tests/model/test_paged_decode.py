"""The Triton decode kernel against attention written out, and a model that decodes through it.

Without a GPU the kernel runs in Triton's interpreter, which costs by the operation: shapes are
small, and examples few.
"""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import HostEngine, host_views, write_model

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import ModelError
from kvxfer.memory.extensible_tensor import tensor_over
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.model import inspect_model
from kvxfer.model.decode_graph import batch_sizes
from kvxfer.model.packing import NULL_BLOCK
from kvxfer.model.runner import ModelRunner, SequenceStep

pytest.importorskip("triton", reason="triton is not installed")

from kvxfer.model.paged_decode import is_interpreted, paged_decode

DEVICE = "cpu" if is_interpreted() else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="TRITON_INTERPRET is off, and torch sees no CUDA device",
)


class Case:
    """Random KV of sequences of `lens` tokens in a cache of `layout`; all other bytes are NaN,
    and so is what the tables' unused entries point to."""

    def __init__(self, spec: KVCacheSpec, layout: KVCacheLayout, lens: list[int], group: int):
        source = torch.Generator().manual_seed(len(lens) + sum(lens))
        num_blocks = sum(spec.num_blocks(n) for n in lens) + 3
        self.spec, self.lens = spec, lens
        view = host_views(spec, layout, num_blocks)[0][0]
        dtype = view.dtype
        order = list(range(2, num_blocks))
        random.Random(0).shuffle(order)
        width = max(1, max(map(spec.num_blocks, lens))) + 1
        self.tables = torch.ones(len(lens), width, dtype=torch.int32)
        self.kv: list[torch.Tensor] = []
        for row, length in enumerate(lens):
            kv = torch.randn(length, spec.num_kv_heads, spec.content_dim, generator=source)
            self.kv.append(kv.to(dtype))
            for token in range(length):
                if token % spec.block_size == 0:
                    self.tables[row, token // spec.block_size] = order.pop()
                block = self.tables[row, token // spec.block_size]
                view[block, :, token % spec.block_size] = self.kv[row][token]
        heads = spec.num_kv_heads * group
        query = torch.randn(heads, len(lens), spec.head_dim_k, generator=source)
        # Strides as a model has them: rows are not the outermost axis.
        self.query = query.to(dtype).transpose(0, 1)
        self.view = view

    def run(self, scaling=0.3, window=None, softcap=None, num_splits=None):
        # The strides are what is tested: .to() of the view itself would not keep them.
        view = self.view._base.to(DEVICE).as_strided(
            self.view.shape, self.view.stride(), self.view.storage_offset()
        )
        query, tables = self.query.to(DEVICE), self.tables.to(DEVICE)
        lens, dim_k = torch.tensor(self.lens, device=DEVICE), self.spec.head_dim_k
        return paged_decode(
            query, view, dim_k, tables, lens, scaling, window, softcap, num_splits
        ).cpu()

    def expected(self, scaling=0.3, window=None, softcap=None):
        """In fp64, a sequence at a time."""
        k_size = self.spec.head_dim_k
        rows = []
        for query, kv in zip(self.query.double(), self.kv, strict=True):
            group = len(query) // self.spec.num_kv_heads
            visible = kv[max(0, len(kv) - window) :] if window else kv
            visible = visible.double().transpose(0, 1).repeat_interleave(group, dim=0)
            key, value = visible[..., :k_size], visible[..., k_size:]
            scores = (key @ query[..., None])[..., 0] * scaling
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores, dim=-1)
            rows.append((weights[:, None] @ value)[:, 0])
        return torch.stack(rows)

    def check(self, num_splits=None, **options):
        found, expected = self.run(num_splits=num_splits, **options), self.expected(**options)
        assert found.dtype == self.view.dtype
        tolerance = TOLERANCE[found.dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_every_layout_gives_the_same_bits(layout):
    spec = KVCacheSpec(3, 2, 16, 16, "float32", 16)
    case = Case(spec, layout, [70, 1], group=4)
    case.check()
    assert torch.equal(case.run(), Case(spec, KVCacheLayout.LBHNC, [70, 1], group=4).run())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_and_odd_shapes(dtype):
    """Head sizes that are no powers of two and differ, blocks of 24 tokens, one KV head."""
    spec = KVCacheSpec(1, 1, 24, 40, dtype, 24)
    Case(spec, KVCacheLayout.BLNHC, [100, 23], group=5).check()


@settings(max_examples=10, deadline=None)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=2),
    window=st.none() | st.integers(1, 160),
    softcap=st.sampled_from([None, 2.0]),
    splits=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 5, 16, 64]),
    shape=st.sampled_from([(1, 1), (1, 17), (2, 1), (2, 3)]),
    layout=st.sampled_from(KVCacheLayout),
)
def test_lengths_windows_and_splits(lens, window, softcap, splits, block_size, shape, layout):
    kv_heads, group = shape
    spec = KVCacheSpec(2, kv_heads, 16, 16, "float32", block_size)
    case = Case(spec, layout, lens, group)
    case.check(num_splits=splits, window=window, softcap=softcap)


def test_a_row_without_tokens_is_zeros_among_others():
    spec = KVCacheSpec(1, 2, 16, 16, "float32", 16)
    found = Case(spec, KVCacheLayout.LBNHC, [0, 33, 0], group=2).run(num_splits=2)
    assert (found[[0, 2]] == 0).all()
    assert found[1].abs().min() > 0


def test_what_was_never_written_shows():
    """A NaN within the length comes out, in every split's part: it must not pass as a maximum."""
    spec = KVCacheSpec(1, 1, 16, 16, "float32", 16)
    case = Case(spec, KVCacheLayout.LBHNC, [40], group=1)
    case.view[case.tables[0, 1], :, 3] = math.nan
    for splits in (1, 4):
        assert case.run(num_splits=splits).isnan().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="this test's memory is the host's")
def test_offsets_beyond_32_bits():
    """Block 4 begins 2**32 elements into the view: wrapped, that would be block 0."""
    stride, total_bytes = 1 << 30, 2 * (5 << 30)
    driver = HostDriver()
    with VirtualBuffer(driver, total_bytes) as buffer:
        buffer.commit([(0, driver.granularity), (4 * stride * 2, driver.granularity)])
        whole = tensor_over(buffer.base_address, total_bytes, "cpu").view(torch.float16)
        view = whole.as_strided((5, 1, 16, 32), (stride, 512, 32, 1))
        view[0], view[4] = 1, torch.arange(512).reshape(1, 16, 32) / 512
        query = torch.ones(1, 1, 16, dtype=torch.float16)
        table, lens = torch.tensor([[4]], dtype=torch.int32), torch.tensor([3])
        found = paged_decode(query, view, 16, table, lens, 1.0)
        key, value = view[4, :, :3, :16].float(), view[4, :, :3, 16:].float()
        expected = torch.softmax(key.sum(-1), dim=-1)[:, None] @ value
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


def test_shapes_that_do_not_fit_are_refused():
    spec = KVCacheSpec(1, 2, 16, 16, "float32", 16)
    case = Case(spec, KVCacheLayout.LBHNC, [3], group=2)
    case.query = case.query[:, :3]
    with pytest.raises(ModelError, match="3 queries of 16 over 2 heads of 32"):
        case.run()


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, (4,)), (4, (4,)), (5, (4, 5)), (8, (4, 8)), (20, (4, 8, 16, 20))]
)
def test_sizes_cover_every_batch(max_batch, sizes):
    assert batch_sizes(max_batch) == sizes


class Again:
    """Records by remembering the work: what CUDA graphs do, op by op. Counts the repetitions."""

    def __init__(self):
        self.repeated = 0

    def __call__(self, work):
        work()

        def repeat():
            self.repeated += 1
            work()

        return repeat


@pytest.fixture(scope="module")
def runner_of(tmp_path_factory):
    """As conftest's, smaller: 2 layers, 4 query heads, 128 positions."""
    if DEVICE == "cuda":
        pytest.skip("these models are on the CPU")

    @functools.cache
    def load(family: str) -> ModelRunner:
        directory = tmp_path_factory.mktemp(family)
        write_model(
            directory,
            family,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        return ModelRunner.load(inspect_model(directory), "cpu", "float32", threads=1)

    return load


@pytest.mark.parametrize(  # gemma2 has layers of both kinds
    "family", ["llama", pytest.param("mistral", marks=pytest.mark.slow), "gemma2"]
)
def test_a_recorded_model_decodes_as_it_does_op_by_op(runner_of, prompts, family):
    """Windows, two groups and a softcap among them; a sequence joins after the second step."""
    runner = runner_of(family)
    plain = HostEngine(runner)
    layouts = [KVCacheLayout.BHLNC, KVCacheLayout.LHBNC][: len(plain.specs)]
    recorded = HostEngine(runner, layouts)
    tables = [[5, 9, 3], [11, 7, 20, 8], [4], [13, 12, 2], [16, 17, 18, 19, 21, 22]]
    expected, found = (
        [engine.prefill(p, t) for p, t in zip(prompts[:5], tables, strict=True)]
        for engine in (plain, recorded)
    )
    plain.decode(expected[:2], 2)
    plain.decode(expected, 1)
    again = Again()
    runner.bind(recorded.views)
    for view in [view for group in recorded.views for view in group]:
        view[NULL_BLOCK] = 0
    assert runner.record_decode(5, again)
    recorded.decode(found[:2], 2)
    recorded.decode(found, 1)
    assert again.repeated == 3
    assert [s.tokens for s in found] == [s.tokens for s in expected]
    for a, b in zip(found, expected, strict=True):
        for kv_a, kv_b in zip(recorded.kv(a), plain.kv(b), strict=True):
            torch.testing.assert_close(kv_a, kv_b, rtol=1e-4, atol=1e-4)


def test_recording_touches_the_null_block_only_and_other_views_drop_it(runner_of):
    engine, other = (HostEngine(runner_of("llama")) for _ in range(2))
    runner, again = engine.runner, Again()
    runner.bind(engine.views)
    assert runner.record_decode(2, again)
    for view in engine.views[0]:
        assert view[1:].isnan().all()
        view[NULL_BLOCK], view[1] = 0, 0
    runner.bind([list(group) for group in engine.views])
    step = SequenceStep([1], 3, [BlockTable([1])])
    runner.decode_step([step])
    assert again.repeated == 1
    too_short = SequenceStep([1], 16, [BlockTable([1])])
    with pytest.raises(ModelError, match="1 blocks of 16 tokens for 17 tokens"):
        runner.decode_step([step, too_short])
    for view in other.views[0]:
        view[NULL_BLOCK], view[1] = 0, 0
    runner.bind(other.views)
    runner.decode_step([step])
    runner.bind(engine.views)
    runner.decode_step([step])
    assert again.repeated == 1


def test_larger_batches_and_prefill_run_op_by_op(runner_of):
    engine, again = HostEngine(runner_of("llama")), Again()
    runner = engine.runner
    runner.bind(engine.views)
    for view in engine.views[0]:
        view[:] = 0
    assert runner.record_decode(2, again)
    runner.decode_step([SequenceStep([1], 3, [BlockTable([b])]) for b in (1, 2, 3)])
    runner.prefill_chunk(SequenceStep([1], 3, [BlockTable([1])]))
    assert again.repeated == 0


def test_a_model_that_changes_kv_after_the_cache_decodes_as_before(runner_of, prompts, caplog):
    """DeepSeek caches a latent and expands it: what the kernel would read is not its KV."""
    runner = runner_of("deepseek_v3")
    engine = HostEngine(runner)
    expected = engine.prefill(prompts[0], [5, 9, 3])
    engine.decode([expected], 3)
    found = engine.prefill(prompts[0], [6, 7, 8])
    assert not runner.record_decode(2, Again())
    assert "changes KV after the cache" in caplog.text
    engine.decode([found], 3)
    assert found.tokens == expected.tokens
