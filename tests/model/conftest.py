from __future__ import annotations

import random
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from support.models import write_model

from kvxfer.model import inspect_model
from kvxfer.model.row_classes import stable_rows
from kvxfer.model.runner import ModelRunner

LINEAR_SHAPES = ((64, 64), (64, 16), (64, 172), (172, 64), (64, 260), (256, 256), (256, 568))
"""(in, out) of the linear layers that these tests run, and of the bundled model's."""


@pytest.fixture(scope="session", autouse=True)
def row_classes() -> None:
    """What bit-identity rests on, checked on this machine before it is relied on."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for inner, outer in LINEAR_SHAPES:
        weight = torch.randn(outer, inner, generator=generator)
        if stable_rows(partial(torch.nn.functional.linear, weight=weight), inner) is None:
            pytest.skip(
                f"on this CPU the rows of a {inner}x{outer} fp32 linear layer depend on how many "
                "there are: nothing here can be bit-identical"
            )


@pytest.fixture(scope="session")
def runner_of(tmp_path_factory: pytest.TempPathFactory):
    """The runner of a tiny random model by family, loaded once; fp32, one thread."""

    @cache
    def load(family: str, copy: int = 0) -> ModelRunner:
        directory: Path = tmp_path_factory.mktemp(f"{family}-{copy}")
        info = inspect_model(write_model(directory, family))
        return ModelRunner.load(info, "cpu", "float32", threads=1)

    return load


@pytest.fixture
def prompts() -> list[list[int]]:
    """Eight prompts of 23 to 90 bytes; fixed."""
    source = random.Random(7)
    return [
        [source.randrange(256) for _ in range(length)] for length in (23, 40, 7, 31, 90, 64, 33, 50)
    ]
