"""One real model of each kind through prefill and decode, over NIXL: prompt KV and tokens are those
of a single process. Random weights, so equal tokens prove little alone: KV is compared by digest,
and two prompts must not have the same."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.models import write_model
from support.workers import make_options

from connectors.loopback import LoopbackConnector
from connectors.nixl import NixlConnector
from kvxfer.cache.footprint import blocks_needed
from kvxfer.cache.spec import GroupKind
from kvxfer.cache.table import BlockTable
from kvxfer.config import WorkerOptions
from kvxfer.control.router_messages import Generate, Sampling
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.worker.engine import Engine, start_engine
from kvxfer.worker.single import generate

NEW_TOKENS = 14
LENGTHS = (1, 16, 75, 40)
CHUNK = 32


@dataclass(frozen=True)
class Kind:
    family: str
    groups: tuple[GroupKind, ...]
    layouts: tuple[str, str]
    """Of prefill and of decode."""
    lane: str = "push"


KINDS = {
    "llama": Kind("llama", (GroupKind.FULL,), ("LBHNC", "BLHNC"), "pull"),
    "mistral, a window in all layers": Kind("mistral", (GroupKind.SLIDING,), ("LBNHC", "BHLNC")),
    "gemma2, a window in half of them": Kind(
        "gemma2",
        (GroupKind.SLIDING, GroupKind.FULL),
        ("full=LHBNC,sliding=LBNHC", "full=LBHNC,sliding=BLNHC"),
        "pull",
    ),
    "deepseek, latent": Kind("deepseek_v3", (GroupKind.MLA,), ("LBHNC", "BLNHC"), "pull"),
    "t5, encoder-decoder": Kind(
        "t5", (GroupKind.FULL, GroupKind.CROSS), ("LBHNC", "full=BLHNC,cross=LHBNC")
    ),
    "bart, encoder-decoder": Kind(
        "bart", (GroupKind.FULL, GroupKind.CROSS), ("BLHNC", "full=LBHNC,cross=LBNHC"), "pull"
    ),
}


def start(connector: type, options: WorkerOptions, incarnation: str) -> Engine:
    name = connector.__module__.rpartition(".")[2]
    return start_engine(options, {name: connector}, incarnation, lambda text: None)


def real_options(model: Path, layout: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "device": "cpu",
        "block_size": 16,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 4,
        "kv_cache_layout": layout,
        "kv_cache_memory_bytes": 16 << 20,
        **changes,
    }


def single_process(model: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[str]]]:
    """Tokens and KV digests of each prompt, in one process that moves nothing."""
    options = make_options("single", **real_options(model, "LBNHC"))
    engine = start(LoopbackConnector, options, "one")
    try:
        engine.cache.extend(engine.initial_blocks)
        engine.pools.grow(engine.initial_blocks)
        answers = []
        for prompt in prompts:
            blocks = engine.pools.allocate(
                blocks_needed(engine.specs, len(prompt), NEW_TOKENS, CHUNK)
            )
            request = Generate("r", prompt, NEW_TOKENS, Sampling(), [], "", True)
            tables = [BlockTable(ids) for ids in blocks]
            found = generate(engine.runner, engine.cache, request, tables, CHUNK)
            engine.pools.free(blocks)
            answers.append((found.tokens, found.kv_digests))
        return answers
    finally:
        engine.connector.close()
        engine.close()


@pytest.fixture(scope="module", autouse=True)
def nixl_is_loaded() -> None:
    """What it opens once for the process is not counted as a leak of the first test."""
    with VirtualBuffer(HostDriver(4096), 8192) as scratch:
        scratch.commit([(0, 8192)])
        window = MemoryWindow(scratch.base_address, 8192, "cpu")
        connector = NixlConnector("first", window)
        connector.exercise(window).close()
        connector.close()


@pytest.fixture(scope="module", params=KINDS)
def kind_and_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kind, Path]]:
    kind = KINDS[request.param]
    yield kind, write_model(tmp_path_factory.mktemp(kind.family), kind.family)


def test_kv_and_tokens_are_those_of_a_single_process(cluster, kind_and_model) -> None:
    kind, model = kind_and_model
    roles = dict(zip(("prefill", "decode"), kind.layouts, strict=True))
    prefill, decode = (
        cluster.add(
            role,
            engine=lambda options, incarnation: start(NixlConnector, options, incarnation),
            **real_options(
                model, layout, lane=kind.lane, connector="nixl", worker_id=secrets.token_hex(4)
            ),
        )
        for role, layout in roles.items()
    )
    assert tuple(spec.kind for spec in decode.engine.specs) == kind.groups
    decode.peers.dial(prefill.address)
    cluster.until(lambda: bool(prefill.peers.ready() and decode.peers.ready()))
    prompts = [[(7 + 31 * n + 13 * i) % 250 for i in range(n)] for n in LENGTHS]
    sent = [cluster.send(decode, tokens=prompt, max_new_tokens=NEW_TOKENS) for prompt in prompts]
    cluster.until(lambda: all(one.finished is not None for one in sent), 60.0)
    expected = single_process(model, prompts)
    for one, (tokens, digests) in zip(sent, expected, strict=True):
        assert (one.finished.reason, one.finished.error) == ("length", "")
        assert one.finished.kv_digests == digests
        assert one.completion.output == tokens
    assert len({tuple(digests) for _, digests in expected}) == len(LENGTHS)
    cluster.until_idle()
