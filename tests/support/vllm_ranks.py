"""Ranks of engines as connectors.vllm sees them, without vLLM: tensors, and a service over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from connectors.vllm.handover import Claim, Load, Offer, RankAddress, Source, Step
from connectors.vllm.layout import LayerGroup, VllmCache, describe
from connectors.vllm.messages import Facts
from connectors.vllm.options import Options
from connectors.vllm.ranks import shares_of
from connectors.vllm.service import Outcome, Service, Setup
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.transfer.endpoint import HeadShard
from kvxfer.transfer.shards import head_range

TIMEOUT_S = 10.0
LAYERS, DIM, BLOCKS = 3, 8, 24
NAMES = tuple(f"model.layers.{index}.attn" for index in range(LAYERS))


def tensors(
    layout: str, heads: int, size: int, layers: int = LAYERS, blocks: int = BLOCKS
) -> list[torch.Tensor]:
    """One [B, H, N, C] a layer, in one allocation, as vLLM makes them."""
    extents = {"L": layers, "B": blocks, "H": heads, "N": size, "C": 2 * DIM}
    raw = torch.zeros([extents[axis] for axis in layout])
    return list(raw.permute([layout.index(axis) for axis in "LBHNC"]).unbind(0))


class Rank:
    """One rank of an engine, and its service."""

    def __init__(
        self,
        name: str,
        *,
        layout: str = "LBHNC",
        size: int = 16,
        rank: int = 0,
        ranks: int = 1,
        heads: int = 4,
        form: str = "tokens",
        model: str = "tiny",
        groups: Sequence[LayerGroup] = (),
        **options: object,
    ) -> None:
        """`size`: tokens in a block. `heads`: of the whole model."""
        held = head_range(rank, ranks, heads)
        found = groups or [LayerGroup(NAMES, len(held), DIM, DIM, size)]
        names = max((group.names for group in found), key=len)
        self.tensors = tensors(layout, len(held), size, len(names))
        by_name = {
            layer: self.tensors[index] for group in found for index, layer in enumerate(group.names)
        }
        self.cache: VllmCache = describe(by_name, found, KVCacheLayout(layout), form)
        self.held, self.size = held, size
        self.facts = Facts(
            engine_id=name,
            incarnation=f"life-{id(self):x}",
            rank=rank,
            size=ranks,
            model=model,
            page_format=self.cache.page_format,
            block_size=self.cache.block_size,
            layers=[list(group.names) for group in self.cache.groups],
        )
        setup = Setup(
            options=Options.resolve({"connectors": "loopback", **options}, {}),
            facts=self.facts,
            port_offset=0,
            shard=HeadShard(held.start, heads),
            is_producer=True,
            is_consumer=True,
            shares=lambda producers: shares_of(rank, ranks, producers, heads),
        )
        self.service = Service(setup, self.cache)

    @property
    def address(self) -> RankAddress:
        assert self.service.address is not None
        return self.service.address

    def tokens(self, blocks: Sequence[int], count: int, heads: range) -> torch.Tensor:
        """[L, count, H, C] of a request's first tokens."""
        mine = slice(heads.start - self.held.start, heads.stop - self.held.start)
        whole = torch.stack([layer[list(blocks)] for layer in self.tensors])[:, :, mine]
        return whole.permute(0, 1, 3, 2, 4).flatten(1, 2)[:, :count]

    def fill(self) -> None:
        """Other bytes in each place."""
        for layer, tensor in enumerate(self.tensors):
            count = torch.arange(tensor.numel(), dtype=torch.float32)
            tensor.copy_((count + layer * 1e5 + self.held.start * 1e6).view(tensor.shape))

    def until(self, done: Callable[[Outcome], bool]) -> Outcome:
        """What came of it, all together, once `done` says so of that."""
        deadline_s, found = time.monotonic() + TIMEOUT_S, Outcome()
        while not done(found):
            assert time.monotonic() < deadline_s, f"only {found}"
            time.sleep(0.002)
            new = self.service.take()
            found.sent |= new.sent
            assert not found.loaded & new.loaded, "told twice"
            found.loaded |= new.loaded
            found.failed |= new.failed
            found.invalid_blocks |= new.invalid_blocks
        return found

    def loaded(self, request_id: str = "d") -> Outcome:
        return self.until(lambda outcome: request_id in outcome.loaded)

    def sent(self, request_id: str = "p") -> Outcome:
        return self.until(lambda outcome: request_id in outcome.sent)


@contextmanager
def running(*ranks: Rank) -> Iterator[None]:
    with ExitStack() as undo:
        for rank in ranks:
            rank.service.start()
            undo.callback(rank.service.stop)
        yield


def source_of(ranks: Sequence[Rank], lease_id: str = "lease") -> Source:
    return Source("P", "p", lease_id, tuple(rank.address for rank in ranks))


def offer(
    ranks: Sequence[Rank], blocks: Sequence[int], count: int, lease_id: str = "lease"
) -> None:
    for rank in ranks:
        rank.service.tell(Step(offers=[Offer("p", lease_id, count, (list(blocks),))]))


def claim(ranks: Sequence[Rank], source: Source) -> None:
    for rank in ranks:
        rank.service.tell(Step(claims=[Claim("d", source)]))


def load(ranks: Sequence[Rank], blocks: Sequence[int], start: int, end: int) -> None:
    for rank in ranks:
        rank.service.tell(Step(loads=[Load("d", start, end, (list(blocks),))]))
