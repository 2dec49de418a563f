"""Which ranks of a consumer claim a request's KV at which ranks of a producer. Pure.

Both are tensor parallel, of any sizes that divide the model's KV heads or are multiples of them.
Every rank of the producer is claimed by somebody, so that its lease ends: one whose heads nobody
reads, as other ranks hold them too, by one consumer's rank that reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.transfer.shards import destinations_of, sources_of


@dataclass(frozen=True, slots=True)
class Share:
    """What one consumer's rank has to do with one of the producer's."""

    rank: int
    """Of the producer."""
    heads: range
    """To be read, in the model's numbers; may be empty."""
    num_readers: int
    """Ranks of the consumer that claim at this one of the producer."""


def shares_of(rank: int, size: int, producer_size: int, num_kv_heads: int) -> list[Share]:
    """Those of the consumer's `rank` of `size`. `num_kv_heads`: of the whole model. Raises
    PlanError where heads and ranks do not divide."""
    reads = dict(sources_of(rank, size, producer_size, num_kv_heads))
    shares = []
    for source in range(producer_size):
        readers = [to for to, _ in destinations_of(source, producer_size, size, num_kv_heads)]
        readers = readers or [source % size]
        if rank in readers:
            shares.append(Share(source, reads.get(source, range(0)), len(readers)))
    return shares
