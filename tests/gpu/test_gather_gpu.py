"""Copies on GPUs of boxes as transfers make them; the body is that of tests/connectors."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from support.box_cases import BoxCase, box, box_cases, check, layout_case

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ConnectorError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

ROOT = Path(__file__).parents[2]
SPEC = KVCacheSpec(3, 4, 64, 64, "bfloat16", 16)
PAIRS = list(itertools.product(KVCacheLayout, KVCacheLayout))
MIB = 1 << 20

COMPILE_ALL = """
import torch
from support.box_cases import BoxCase, box, check
from connectors.gather import GpuCopier
copier = GpuCopier("cuda:0")
def copy(boxes, src_base, dst_base):
    copier.wait(copier.start(boxes, src_base, dst_base), 60)
for run in range(16, 4096, 272):
    check(copy, BoxCase((box([0, 8192], [0, 4096], run),), 16384, 8192), "cuda:0", "cuda:0")
for extents in ((), (2,), (3, 5), (2, 3, 4)):
    count = len(extents)
    strides = tuple(64 * 8 ** (count - i) for i in range(count))
    nest = box([0], [0], 64, extents, strides, strides)
    check(copy, BoxCase((nest,), 1 << 17, 1 << 17), "cuda:0", "cuda:0")
"""

TOUCH_UNMAPPED = """
import torch
from support.box_cases import box
from connectors.gather import GpuCopier
from kvxfer.errors import ConnectorError
copier = GpuCopier("cuda:0")
copier.warm_up()
there = torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
for _ in range(2):
    try:
        copier.wait(copier.start([box([0], [0], 4096)], 1 << 46, there.data_ptr()), 30)
    except ConnectorError as error:
        print("typed:", error)
"""


def copier(device="cuda:0", **options):
    from connectors.gather import GpuCopier

    return GpuCopier(device, **options)


def copy_with(device="cuda:0", **options):
    made = copier(device, **options)
    return lambda boxes, src, dst: made.wait(made.start(boxes, src, dst), 60)


def run_child(code, **environment):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=170, capture_output=True, text=True
    )


def large_case():
    """Runs for every row length of the kernel, aligned to 16 bytes and less, and for the engines;
    neighbouring boxes have runs of either kind."""
    boxes, src_end, dst_end = [], 0, 0
    for run in (16, 48, 520, 4096, 65536 + 32, 3 * MIB + 1):
        num_starts = 17 if run < MIB else 3
        stride = -(-run // 16) * 16
        src = [src_end + (i * 7 % num_starts) * stride for i in range(num_starts)]
        dst = [dst_end + i * (stride + 16) for i in range(num_starts)]
        boxes.append(box(src, dst, run))
        src_end += num_starts * stride
        dst_end += num_starts * (stride + 16)
    return BoxCase(tuple(boxes), src_end, dst_end)


@settings(max_examples=100, deadline=None)
@given(case=box_cases(max_starts=40))
def test_random_boxes_within_a_gpu(case):
    check(copy_with(), case, "cuda:0", "cuda:0")


@pytest.mark.parametrize(
    "options",
    [{}, {"max_programs": 1}, {"max_programs": 528}, {"engine_bytes": 2 * MIB},
     {"tile_bytes": 4096, "num_warps": 4}, {"num_warps": 16}],
    ids=str,
)  # fmt: skip
def test_runs_of_all_lengths_within_a_gpu(options):
    check(copy_with(**options), large_case(), "cuda:0", "cuda:0")


@pytest.mark.parametrize("src, dst", PAIRS, ids="-".join)
def test_layout_pairs_with_partial_blocks_within_a_gpu(src, dst):
    check(copy_with(), layout_case(SPEC, src, dst, 9, range(5, 130)), "cuda:0", "cuda:0")


@pytest.mark.parametrize("importer", [0, 1])
def test_between_two_gpus_pull_and_push(importer):
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one CUDA device; this needs two")
    if not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("the two devices cannot reach each other's memory")
    # torch opens the way from one device to the other with its first copy between them.
    for here, there in ((0, 1), (1, 0)):
        torch.zeros(1, device=f"cuda:{here}").to(f"cuda:{there}")
    copy = copy_with(f"cuda:{importer}")
    check(copy, large_case(), "cuda:0", "cuda:1")
    for src, dst in PAIRS[::5]:
        check(copy, layout_case(SPEC, src, dst, 9, range(5, 130)), "cuda:0", "cuda:1")


def test_copies_follow_one_another_and_are_seen_to_end():
    made = copier()
    made.warm_up()
    first, second, third = (
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0") for _ in "abc"
    )
    first.random_(0, 256)
    torch.cuda.synchronize()
    whole = [box([0], [0], 64 * MIB)]
    one = made.start(whole, first.data_ptr(), second.data_ptr())
    blocks = [box(list(range(0, 64 * MIB, MIB))[::-1], list(range(0, 64 * MIB, MIB)), MIB)]
    two = made.start(blocks, second.data_ptr(), third.data_ptr())
    made.wait(two, 60)
    assert made.is_finished(one)
    assert not two.uploads
    assert torch.equal(third.view(64, MIB), first.view(64, MIB).flip(0))


def test_a_copy_that_takes_too_long_is_an_error():
    made = copier(max_programs=1, engine_bytes=1 << 40)
    made.warm_up()
    memory = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0")
    half = memory.numel() // 2
    torch.cuda.synchronize()
    quarter = half // 2
    boxes = [box([0, quarter], [half, half + quarter], quarter)]
    slow = made.start(boxes, memory.data_ptr(), memory.data_ptr())
    with pytest.raises(ConnectorError, match="took more than 0"):
        made.wait(slow, 0.0)
    made.wait(slow, 60)


def test_block_shapes_share_few_compilations(tmp_path):
    done = run_child(COMPILE_ALL, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    compiled = list(tmp_path.rglob("_copy_boxes.cubin"))
    assert 3 <= len(compiled) <= 5, [path.parent.name for path in compiled]


def test_unmapped_memory_is_a_typed_error_that_stays():
    done = run_child(TOUCH_UNMAPPED)
    assert done.stdout.count("typed: GPU") == 2, done.stdout + done.stderr
