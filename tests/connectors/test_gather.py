"""The copy kernel against runs copied one by one; what goes into its table, without it.

Without a GPU it runs in Triton's interpreter, which costs by the step: boxes are small.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from support.box_cases import BoxCase, box, box_cases, check, layout_case

from connectors.box_shapes import (
    MAX_ROWS,
    choose_cols,
    kernel_sized,
    magic_divisor,
    take_long_runs,
    unit_bytes,
)
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ConnectorError, UsageError

pytest.importorskip("triton", reason="triton is not installed")

from connectors import gather
from connectors.gather import GpuCopier, is_interpreted

DEVICE = "cpu" if is_interpreted() else "cuda"
SPEC = KVCacheSpec(2, 2, 8, 8, "bfloat16", 4)

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="TRITON_INTERPRET is off, and torch sees no CUDA device",
)


def run(case, max_programs=3, tile_bytes=512, **options):
    """Through a copier of small tiles, so that small boxes take many steps."""
    copier = GpuCopier(DEVICE, max_programs, tile_bytes, **options)

    def copy(boxes, src_base, dst_base):
        copier.wait(copier.start(boxes, src_base, dst_base), 60)

    check(copy, case, DEVICE, DEVICE)


@settings(max_examples=12, deadline=None)
@given(box_cases())
def test_every_byte_is_where_it_belongs(case):
    run(case)


@pytest.mark.parametrize("engine_bytes", [1, 200, 1000, 1 << 20])
def test_engines_and_kernel_share_a_box(engine_bytes):
    """Starts 0 to 2 and 4 to 5 adjoin on both sides, 3 on one, the last on none."""
    src = [0, 100, 200, 1100, 1200, 1300, 0]
    dst = [0, 100, 200, 300, 400, 500, 700]
    boxes = (box(src, dst, 100), box([0], [900], 200, (2,), (400,), (250,)))
    run(BoxCase(boxes, 1400, 1400), engine_bytes=engine_bytes)


LBHNC, LBNHC, BHLNC = (KVCacheLayout(name) for name in ("LBHNC", "LBNHC", "BHLNC"))


@pytest.mark.parametrize("src, dst", [(LBHNC, LBHNC), (LBNHC, BHLNC), (BHLNC, LBNHC)])
def test_layouts_with_partial_blocks(src, dst):
    run(layout_case(SPEC, src, dst, 4, range(3, 14)))


def test_programs_of_one_copy_may_differ():
    case = BoxCase((box([0, 512], [1024, 0], 512),), 1024, 1536)
    copier = GpuCopier(DEVICE, tile_bytes=512)

    def copy(boxes, src_base, dst_base):
        for programs in (1, 1000):
            copier.wait(copier.start(boxes, src_base, dst_base, programs), 60)

    check(copy, case, DEVICE, DEVICE)


def test_warm_up_moves_nothing_and_may_come_twice():
    copier = GpuCopier(DEVICE, tile_bytes=512)
    copier.warm_up()
    copier.warm_up([box([0], [2], 6)])


@pytest.mark.parametrize(
    "options, field",
    [
        ({"max_programs": 0}, "max_programs"),
        ({"tile_bytes": 3000}, "tile_bytes"),
        ({"tile_bytes": 64}, "tile_bytes"),
        ({"num_warps": 3}, "num_warps"),
        ({"num_warps": 64}, "num_warps"),
        ({"device": "cuda" if DEVICE == "cpu" else "cpu"}, "device"),
    ],
)
def test_bad_options_are_named(options, field):
    with pytest.raises(UsageError) as caught:
        GpuCopier(**{"device": DEVICE, **options})
    assert caught.value.field == field


def test_no_copy_with_no_programs():
    with pytest.raises(UsageError, match="max_programs"):
        GpuCopier(DEVICE).start((), 0, 0, max_programs=0)


def test_a_launch_that_fails_ends_the_copy_and_not_the_call(monkeypatch):
    """Other kernels of the same copy may be at work by then, so `start` must not raise."""
    copier = GpuCopier(DEVICE)
    monkeypatch.setattr(gather, "_copy_kernel", {(1,): broken_launch})
    copy = copier.start([box([0], [16], 16)], 0, 0)
    for _ in range(2):
        with pytest.raises(ConnectorError, match=r"GPU copy: RuntimeError: out of threads$"):
            copier.wait(copy, 10)


def broken_launch(*args, **options):
    raise RuntimeError("out of threads\nin the driver")


def test_magic_division_is_exact():
    source = random.Random(0)
    divisors = [*range(1, 70), *(2**p + d for p in range(7, 31) for d in (-1, 0, 1)), MAX_ROWS]
    for divisor in divisors:
        magic, shift = magic_divisor(divisor)
        assert magic < 1 << 32 and shift < 64
        near = (k * divisor + d for k in (1, 2, MAX_ROWS // divisor) for d in (-1, 0, 1))
        numbers = [0, MAX_ROWS - 1, MAX_ROWS, *near, *(source.randrange(MAX_ROWS) for _ in "abc")]
        for number in numbers:
            if 0 <= number <= MAX_ROWS:
                assert number * magic >> shift == number // divisor, (number, divisor)


def test_rows_come_from_few_choices_and_fit_the_run():
    choices = (8, 32, 128, 512, 2048)
    for units in range(1, 5000):
        cols = choose_cols(units, choices)
        assert cols in choices
        lost = -units % cols
        assert lost <= max(7, 0.2 * units), (units, cols)
    assert [choose_cols(n, choices) for n in (1, 32, 33, 72, 2048, 1 << 20)] == [
        *(8, 32, 8, 8, 2048, 2048)
    ]


def test_units_fit_every_number():
    wide = box([16, 48], [32, 64], 16, (2,), (16,), (160,))
    assert unit_bytes(wide, 1 << 21, 1 << 22, 16) == 16
    assert unit_bytes(wide, 1 << 21, (1 << 22) + 4, 16) == 4
    assert unit_bytes(box([0], [0], 3), 0, 0, 16) == 1
    assert unit_bytes(box([0, 8], [0, 16], 32), 0, 0, 16) == 8


def test_boxes_are_cut_where_rows_would_not_fit_31_bits():
    huge = box([0, 1 << 40, 2 << 40], [0, 1 << 41, 2 << 41], 1 << 34)
    parts = list(kernel_sized(huge, 16))
    assert [len(part.dst_starts) for part in parts] == [1, 1, 1]
    assert [int(part.dst_starts[0]) for part in parts] == huge.dst_starts.tolist()
    with pytest.raises(ConnectorError, match="rows of 4 bytes"):
        list(kernel_sized(huge, 4))


def test_long_runs_and_the_rest_are_the_whole():
    whole = box([0, 10, 90, 50, 60, 70], [0, 10, 20, 30, 40, 50], 10, (2,), (200,), (100,))
    long, rest = take_long_runs(whole, 20)
    found = dict(zip(long.dst_offsets, zip(long.src_offsets, long.sizes, strict=True), strict=True))
    assert found == {0: (0, 20), 100: (200, 20), 30: (50, 30), 130: (250, 30)}
    assert (rest.src_starts.tolist(), rest.dst_starts.tolist()) == ([90], [20])
    long, rest = take_long_runs(whole, 61)
    assert not long.sizes and rest is whole
