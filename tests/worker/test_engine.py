"""The start of a worker with the real model: growable, fixed and explicitly sized caches give the
same bits, and each size follows from its account."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.commands import TINY_MODEL

from connectors.loopback import LoopbackConnector
from kvxfer.cache.table import BlockTable
from kvxfer.config import WorkerOptions, resolve
from kvxfer.control.router_messages import Generate, Sampling
from kvxfer.errors import UsageError
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.worker.engine import Engine, start_engine
from kvxfer.worker.single import generate
from kvxfer.worker.start import WarmUpHook

BUDGET = 1 << 31
PROMPT = (TINY_MODEL / "excerpt.txt").read_text()[:700]
MIB = 1 << 20


@contextmanager
def started(incarnation: str, hooks: Sequence[WarmUpHook] = (), **changes: Any) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "model": TINY_MODEL,
        "worker_id": "engine",
        "connector": "loopback",
        "device": "cpu",
        "memory_budget_bytes": BUDGET,
        "max_num_seqs": 4,
    }
    resolved = resolve(WorkerOptions(**options | changes), "single")
    engine = start_engine(
        resolved, {"loopback": LoopbackConnector}, incarnation, lambda text: None, hooks
    )
    try:
        yield engine
    finally:
        engine.connector.close()
        engine.close()


def answer(engine: Engine, grow_first: int = 0) -> tuple[list[int], list[str]]:
    """Tokens and KV digests of one prompt, in blocks at the end of what is committed."""
    engine.cache.extend([max(engine.initial_blocks[0], grow_first)])
    tokens = Tokenizer.load(TINY_MODEL).encode(PROMPT)
    request = Generate(
        request_id="r",
        tokens=tokens,
        max_new_tokens=16,
        sampling=Sampling(),
        stop_token_ids=[],
        prefill="",
        verify=True,
    )
    needed = engine.specs[0].num_blocks(len(tokens) + 16)
    last = engine.cache.committed_blocks[0]
    tables = [BlockTable(range(last - needed, last))]
    found = generate(engine.runner, engine.cache, request, tables, chunk_tokens=128)
    return found.tokens, found.kv_digests


@pytest.fixture(scope="module")
def growable() -> tuple[list[int], list[str]]:
    with started("a", kv_commit="elastic", kv_initial_blocks=64) as engine:
        before = answer(engine)
        base = engine.cache.buffer.base_address
        after = answer(engine, grow_first=300)
        assert engine.cache.buffer.base_address == base
        assert after == before, "growth changes nothing"
        return before


def test_a_growable_cache_is_sized_by_what_is_left() -> None:
    with started("b", kv_commit="elastic") as engine:
        account = engine.account
        taken = account.warm_up
        assert account.available == BUDGET
        assert taken.weights > 20 * MIB
        assert account.kv == account.available - taken.used - account.buffer
        assert engine.budget.kv_bytes == account.kv
        assert 2 <= engine.initial_blocks[0] < account.kv // engine.specs[0].block_bytes
        assert engine.affordable() == engine.budget


def test_what_else_allocates_is_run_and_measured() -> None:
    """S18: an encoder cache, a draft model: each has its row in the account."""
    kept = []
    hooks = [
        WarmUpHook("draft model", lambda runner: kept.append(bytearray(b"\1" * (96 * MIB)))),
        WarmUpHook("nothing", lambda runner: None),
    ]
    with started("h", hooks, kv_commit="elastic") as engine:
        taken = engine.account.warm_up
        assert [name for name, _ in taken.hooks] == ["draft model", "nothing"]
        assert 90 * MIB < taken.hooks[0][1] < 110 * MIB
        assert taken.hooks[1][1] < 8 * MIB
        account = engine.account
        assert account.kv == account.available - taken.used - account.buffer
        assert any("draft model" in line for line in account.lines())


def test_a_fixed_cache_gives_the_same_bits(growable: tuple[list[int], list[str]]) -> None:
    with started("c", enable_extensible_kv_cache=False, memory_budget_bytes=BUDGET) as engine:
        assert engine.driver.name == "fixed"
        assert engine.initial_blocks == [engine.cache.geometry.groups[0].capacity_blocks]
        assert answer(engine) == growable


def test_an_explicit_size_gives_the_same_bits_and_is_exact(
    growable: tuple[list[int], list[str]],
) -> None:
    size = 64 * MIB
    with started("d", kv_cache_memory_bytes=size, kv_cache_layout="BHLNC") as engine:
        assert engine.initial_blocks == [size // engine.specs[0].block_bytes]
        assert engine.account.kv == size
        assert answer(engine) == growable


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 600_000, "kv_cache_layout": "LHBNC"}, "kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"enable_extensible_kv_cache": False, "kv_commit": "elastic"}, "kv_commit"),
    ],
)
def test_sizes_that_cannot_be_are_refused_and_leave_nothing(
    changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UsageError) as refused, started("e", **changes):
        pass
    assert refused.value.field == field
