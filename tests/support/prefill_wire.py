"""A prefill worker that a test plays in front of a real decode worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.cluster import Cluster, Sent
from support.wire_peer import WirePeer
from support.workers import Worker

from kvxfer.control.messages import (
    Abort,
    Aborted,
    Confirmed,
    Done,
    FirstToken,
    Hello,
    Lease,
    PrefillRequest,
    Ready,
)
from kvxfer.control.router_messages import TransferStats

NUM_TOKENS = 10
LAYERS = 2
BLOCKS = [[1, 2, 3]]
FIRST = 7


def meet(cluster: Cluster, lane: str, **options: Any) -> tuple[WirePeer, Worker]:
    """A decode worker that is ready, and the wire that it takes for its prefill worker."""
    wire = cluster.wire("prefill", "tcp://127.0.0.1:0", lane=lane)
    decode = cluster.add("decode", lane=lane, **options)
    decode.peers.dial(wire.address)
    cluster.until(lambda: bool(wire.of(Hello)))
    hello = wire.of(Hello)[0].facts
    wire.send(wire.welcome(lane))
    wire.connector.connect("decode", hello.ranks[0].base_address, hello.ranks[0].description)
    cluster.until(lambda: bool(decode.peers.ready()))
    return wire, decode


def granted(
    cluster: Cluster,
    wire: WirePeer,
    decode: Worker,
    tell: Callable[[PrefillRequest], object] | None = None,
    **more: Any,
) -> tuple[Sent, PrefillRequest]:
    """A request of which the wire holds the grant, and whose first token, FIRST, it has told
    (unless `tell` is to do that): (sent, its PrefillRequest)."""
    known = len(wire.of(PrefillRequest))
    sent = cluster.send(decode, num_tokens=NUM_TOKENS, **more)
    cluster.until(lambda: len(wire.of(PrefillRequest)) > known)
    asked = wire.of(PrefillRequest)[-1]
    if tell is not None:
        tell(asked)
        return sent, asked
    wire.send(first_token(asked))
    cluster.until(lambda: sent.completion.output == [FIRST])
    return sent, asked


def first_token(asked: PrefillRequest, token: int = FIRST) -> FirstToken:
    return FirstToken(asked.request_id, asked.grant.grant_id, token)


def done(asked: PrefillRequest, **changes: Any) -> Done:
    fields: dict[str, Any] = {
        "request_id": asked.request_id,
        "grant_id": asked.grant.grant_id,
        "num_tokens": NUM_TOKENS,
        "num_cached_tokens": asked.grant.num_cached_tokens,
        "num_layers": LAYERS,
        "num_ranks": 1,
        "first_token": FIRST,
        "transfer": TransferStats(),
        "digest": None,
    }
    return Done(**fields | changes)


def ready(
    asked: PrefillRequest,
    start: int = 0,
    stop: int = NUM_TOKENS,
    final: bool = True,
    lease_id: str = "",
    blocks: Sequence[Sequence[int]] = BLOCKS,
    layers: Sequence[tuple[int, int]] = ((0, LAYERS),),
) -> Ready:
    lease = Lease(lease_id or asked.grant.grant_id, [list(ids) for ids in blocks], 10.0)
    return Ready(asked.request_id, lease, start, stop, list(layers), final)


def confirmed(asked: PrefillRequest, lease_id: str = "") -> Confirmed:
    return Confirmed(asked.request_id, lease_id or asked.grant.grant_id, FIRST, None)


def settle_all(cluster: Cluster, wire: WirePeer) -> None:
    """Answer each Abort, until all is quiet."""
    answered = 0

    def quiet() -> bool:
        nonlocal answered
        for abort in wire.of(Abort)[answered:]:
            answered += 1
            wire.send(Aborted(abort.request_id, abort.grant_id))
        return cluster.idle()

    cluster.until(quiet)
    for worker in cluster.workers:
        worker.check_conserved()


def check_never_counted(sent: Sent, decode: Worker) -> None:
    """What prefill said is all that was said."""
    assert sent.completion.output == [FIRST]
    assert decode.runner.batch_sizes == []
