"""The staged way between two processes with growable GPU memory, checked byte by byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support import growable_end
from support.box_cases import layout_case
from support.growable_end import End, pattern
from support.planning import bytes_of_boxes

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.plan import TransferPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

MIB = 1 << 20
SIZE = 96 * MIB
"""Two chunks of growable memory."""
ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
SPEC = KVCacheSpec(8, 8, 128, 128, "bfloat16", 16)
"""512 KiB a block; runs of 512 bytes where a head's tokens lie apart."""


@contextmanager
def ends(device: str, gpu: int) -> Iterator[End]:
    """This process's, which knows the other's as 'peer'; the other sees `gpu` alone."""
    here = End("staged", device, f"here-{os.getpid()}", SIZE, 1)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, growable_end.__file__, "staged", device, f"there-{gpu}", str(SIZE), "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        description = bytes.fromhex(ready["description"])
        here.connector.connect("peer", ready["base"], description)
        yield here
        process.communicate("", timeout=DEADLINE_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        here.close()


def move(here: End, direction: Direction, plan: TransferPlan) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    ticket = here.connector.submit("peer", direction, plan)
    while not (ended := here.connector.poll()):
        assert time.monotonic() < begun + DEADLINE_S
    assert [(result.ticket, result.error) for result in ended] == [(ticket, None)]
    return time.monotonic() - begun


def check(device: str, gpu: int) -> None:
    """Pulled, changed, pushed, and pulled back, in equal and in unequal layouts."""
    whole = np.zeros(1, dtype=np.int64)
    everything = TransferPlan.of_runs(whole, whole, whole + 96 * MIB // 2)
    for pair in (("LBHNC", "LBHNC"), ("BLHNC", "LBNHC"), ("LBNHC", "BHLNC")):
        layouts = [KVCacheLayout[name] for name in pair]
        plan = TransferPlan(layout_case(SPEC, *layouts, 48, range(5, 48 * 16)).boxes)
        origins, places = (torch.from_numpy(one) for one in bytes_of_boxes(plan.boxes))
        with ends(device, gpu) as here:
            ours, theirs = pattern(SIZE, 1), pattern(SIZE, 2)
            pulled = move(here, Direction.PULL, plan)
            ours[places] = theirs[origins]
            assert torch.equal(here.bytes.cpu(), ours)
            pushed = move(here, Direction.PUSH, plan)
            theirs[places] = ours[origins]
            move(here, Direction.PULL, everything)
            ours[: SIZE // 2] = theirs[: SIZE // 2]
            assert torch.equal(here.bytes.cpu(), ours)
            rates = [plan.total_bytes / seconds / 1e9 for seconds in (pulled, pushed)]
            print(f"{device} {gpu} {pair}: pull {rates[0]:.1f}, push {rates[1]:.1f} GB/s, cold")


def test_two_processes_on_one_gpu() -> None:
    check("cuda:0", 0)


def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check("cuda:0", 1)
