"""The embedding API in one process: transfers, growth, revocation in order, and bad input."""

from __future__ import annotations

import threading

import pytest
import torch
from support.endpoints import (
    TIMEOUT_S,
    expected,
    fill,
    growable,
    kv_spec,
    meet,
    memfds,
    part,
    same,
    snapshot,
)

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import GroupKind
from kvxfer.errors import (
    BlocksInUse,
    CacheError,
    CapacityExceeded,
    ConnectorError,
    DeadlineExceeded,
    HandshakeRejected,
    KvxferError,
    MemoryPinned,
    PlanError,
    RegionError,
    TransferError,
    UsageError,
)
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.endpoint import Endpoint, HeadShard
from kvxfer.transfer.lanes import Lane


@pytest.fixture
def pair():
    with growable("a") as a, growable("b", layout="BLNHC") as b:
        meet(a, b)
        fill(a, 1)
        fill(b, 2)
        yield a, b


def grow(endpoint: Endpoint) -> None:
    """To 600 blocks, in chunks of which those above some hundred can go."""
    endpoint.grow(100)
    endpoint.grow(600)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("layouts", "sizes", "tokens", "layers"),
    [
        (("LBHNC", "BLNHC"), (16, 16), range(64), None),
        (("LHBNC", "LBNHC"), (8, 32), range(5, 61), range(1, 2)),
        (("BHLNC", "LHBNC"), (32, 8), range(33), None),
        (("BLHNC", "BHLNC"), (16, 4), range(17, 18), range(1)),
    ],
)
def test_exactly_the_tokens_move_between_any_layouts_and_block_sizes(
    direction, layouts, sizes, tokens, layers
):
    specs = [kv_spec(block_size=size) for size in sizes]
    with growable("a", specs[0], layouts[0]) as a, growable("b", specs[1], layouts[1]) as b:
        meet(a, b)
        fill(a, 1)
        fill(b, 2)
        blocks = [list(range(1, 1 + 64 // size)) for size in sizes]
        blocks[0].reverse()
        source, before = snapshot(a), snapshot(b)
        if direction is Direction.PUSH:
            ticket = a.push("b", *blocks, tokens, layers)
        else:
            ticket = b.pull("a", *blocks, tokens, layers)
        assert not ticket.done
        ticket.wait(TIMEOUT_S)
        wanted = expected(source, before, tuple(blocks), tokens, layers)
        assert torch.equal(snapshot(b), wanted)
        assert torch.equal(snapshot(a), source)
        assert ticket.num_bytes == len(tokens) * len(layers or range(2)) * 4 * 16 * 4


def test_ranks_of_other_sizes_get_the_heads_that_they_hold():
    whole, half = kv_spec(), kv_spec(num_kv_heads=2)
    with growable("a", whole) as a, growable("b", half, shards=[HeadShard(2, 4)]) as b:
        meet(a, b)
        fill(a, 1)
        fill(b, 2)
        source, before = snapshot(a), snapshot(b)
        b.pull("a", [3, 4], [2, 1]).wait(TIMEOUT_S)
        heads = range(2, 4), range(2)
        wanted = expected(source, before, ([3, 4], [2, 1]), range(32), heads=heads)
        assert torch.equal(snapshot(b), wanted)
        a.push("b", [3, 4], [5, 6], heads=range(1, 3)).wait(TIMEOUT_S)
        heads = range(2, 3), range(1)
        wanted = expected(source, wanted, ([3, 4], [5, 6]), range(32), heads=heads)
        assert torch.equal(snapshot(b), wanted)
        with pytest.raises(PlanError, match="nothing to move"):
            a.push("b", [3], [5], heads=range(2))


def test_groups_move_one_by_one():
    specs = [kv_spec(), kv_spec(num_layers=1, block_size=32)]
    layouts = [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC]
    sides = [
        Endpoint.create(
            name, device="cpu", specs=specs, layouts=layouts, capacity_blocks=[64, 64],
            initial_blocks=[8, 8], connectors=["loopback"],
        )
        for name in "ab"
    ]  # fmt: skip
    with sides[0] as a, sides[1] as b:
        for side in sides:
            side.register()
            fill(side, 1, group=0)
            fill(side, ord(side.name), group=1)
        meet(a, b)
        b.pull("a", [1], [2], group=1).wait(TIMEOUT_S)
        assert same(b, 2, a, 1, group=1)
        assert torch.equal(snapshot(b), snapshot(a)), "the other group is as it was"
        b.grow(8, 64)
        assert b.num_blocks[1] == 64
        for group in (2, -1):
            with pytest.raises(PlanError, match="group"):
                b.pull("a", [1], [1], group=group)
        with pytest.raises(CacheError, match="2 groups"):
            b.grow(8)


def test_growth_reaches_peers_by_an_update_and_moves_no_byte(pair):
    a, b = pair
    views, before, old = b.views, snapshot(b), b.num_blocks[0]
    with pytest.raises(RegionError, match="no registered region"):
        a.push("b", [1], [old + 100])
    b.grow(old + 200)
    assert b.views is views
    assert torch.equal(snapshot(b, old), before)
    b.check_conservation()
    with pytest.raises(RegionError):
        a.push("b", [1], [old + 100])
    assert not b.has_acknowledged("a")
    told = b.update()
    b.grow(old + 400)
    both = b.update()
    acknowledgement = a.apply("b", told)
    a.push("b", [1], [old + 100]).wait(TIMEOUT_S)
    assert same(b, old + 100, a, 1)
    b.acknowledge("a", acknowledgement)
    assert not b.has_acknowledged("a")
    b.acknowledge("a", a.apply("b", both))
    assert b.has_acknowledged("a")
    assert a.apply("b", told) == a.apply("b", both), "old news is acknowledged as of now"
    a.push("b", [1], [old + 300]).wait(TIMEOUT_S)
    with pytest.raises(CapacityExceeded):
        b.grow(5000)
    b.check_conservation()


def test_an_update_names_what_is_new_only(pair):
    a, b = pair
    b.grow(300)
    first = b.update()
    assert b.update() == first, "it may be told again"
    b.acknowledge("a", a.apply("b", first))
    everything = len(b.describe("c"))
    b.fence("c")
    b.grow(400)
    assert len(b.update()) < everything


def test_an_update_that_was_lost_is_made_up_for_by_the_next(pair):
    a, b = pair
    b.grow(100)
    b.update()
    b.grow(200)
    b.acknowledge("a", a.apply("b", b.update()))
    a.push("b", [1, 2], [99, 199]).wait(TIMEOUT_S)
    assert same(b, 99, a, 1)
    assert same(b, 199, a, 2)


def test_memory_goes_only_when_every_peer_has_let_go(pair):
    a, b = pair
    with growable("c") as c:
        meet(b, c)
        grow(b)
        for peer in (a, c):
            b.acknowledge(peer.name, peer.apply("b", b.update()))
        committed = memfds()
        told = b.revoke(64)
        bound = b.num_blocks[0]
        assert 64 <= bound < 200
        for forbidden in (lambda: b.grow(700), b.register, lambda: b.revoke(32)):
            with pytest.raises(CacheError, match="not released"):
                forbidden()
        with pytest.raises(MemoryPinned, match="a, c may still reach it"):
            b.release()
        b.acknowledge("a", a.apply("b", told))
        with pytest.raises(MemoryPinned, match="c may still reach it"):
            b.release()
        assert memfds() == committed
        with pytest.raises(RegionError):
            a.push("b", [1], [500])
        with pytest.raises(RegionError):
            b.pull("a", [1], [500])
        b.acknowledge("c", c.apply("b", told))
        assert b.release() > 0
        assert memfds() < committed
        b.check_conservation()
        with pytest.raises(CacheError, match="nothing was revoked"):
            b.release()
        with pytest.raises(CacheError, match="frees nothing"):
            b.revoke(bound)
        a.push("b", [1], [bound - 1]).wait(TIMEOUT_S)
        assert same(b, bound - 1, a, 1)
        grow(b)
        b.acknowledge("a", a.apply("b", b.update()))
        a.push("b", [2], [500]).wait(TIMEOUT_S)
        assert same(b, 500, a, 2)
        part(b, c)


def test_a_revocation_that_is_told_again_takes_nothing_that_came_later(pair):
    a, b = pair
    grow(b)
    b.acknowledge("a", a.apply("b", b.update()))
    told = b.revoke(64)
    b.acknowledge("a", a.apply("b", told))
    b.release()
    grow(b)
    now = a.apply("b", b.update())
    assert a.apply("b", told) == now
    b.acknowledge("a", now)
    a.push("b", [1], [500]).wait(TIMEOUT_S)
    assert same(b, 500, a, 1)


def fail(*_: object) -> None:
    raise ConnectorError("out of order")


def test_a_growth_that_cannot_be_registered_is_taken_back(pair, monkeypatch):
    a, b = pair
    before = memfds(), b.num_blocks, b.update()
    with monkeypatch.context() as broken:
        broken.setattr(b._connector.connectors["loopback"], "register", fail)
        with pytest.raises(ConnectorError, match="out of order"):
            b.grow(600)
        assert (memfds(), b.num_blocks, b.update()) == before
        b.check_conservation()
    b.grow(600)
    a.apply("b", b.update())
    a.push("b", [1], [500]).wait(TIMEOUT_S)


def test_memory_stays_where_a_transport_does_not_close(monkeypatch):
    with growable("a") as a, growable("b") as b:
        meet(a, b)
        ticket = b.pull("a", [1], [1])
        view = b.views[0][0]
        connector = b._connector.connectors["loopback"]
        with monkeypatch.context() as broken:
            broken.setattr(connector, "close", fail)
            with pytest.raises(ConnectorError, match="out of order"):
                b.close()
        view[1] = 1.0
        assert ticket.done
        with pytest.raises(ConnectorError, match="endpoint b was closed"):
            ticket.wait(0)
        connector.close()
        b._memory.memory.close([])
        a.fence("b")


def test_a_peer_whose_process_has_ended_is_waited_for_no_more(pair):
    b = pair[1]
    grow(b)
    b.revoke(64)
    with pytest.raises(MemoryPinned):
        b.release()
    b.fence("a")
    assert b.has_acknowledged("a")
    assert b.release() > 0
    with pytest.raises(TransferError, match="peer a is not connected"):
        b.pull("a", [1], [1])


def test_blocks_in_use_are_neither_revoked_nor_acknowledged(pair):
    a, b = pair
    grow(b)
    b.acknowledge("a", a.apply("b", b.update()))
    inbound, outbound = b.pull("a", [1], [500]), a.push("b", [1], [501])
    with pytest.raises(BlocksInUse, match="block 500"):
        b.revoke(64)
    inbound.wait(TIMEOUT_S)
    told = b.revoke(64)
    with pytest.raises(TransferError, match="1 transfers are under way"):
        a.apply("b", told)
    with pytest.raises(TransferError, match="1 transfers are under way"):
        a.disconnect("b")
    with pytest.raises(MemoryPinned):
        b.release()
    outbound.wait(TIMEOUT_S)
    assert same(b, 501, a, 1)
    b.acknowledge("a", a.apply("b", told))
    b.release()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 3}, "num_layers"),
        ({"head_dim_k": 4, "head_dim_v": 12}, "head_dim_k"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"block_size": 24}, "block_size"),
        ({"kind": GroupKind.SLIDING, "window": 64}, "kind"),
        ({"num_kv_heads": 2}, "total_heads"),
    ],
)
def test_caches_that_do_not_fit_are_refused_by_the_field(changes, field):
    with growable("a") as a, growable("b", kv_spec(**changes)) as b:
        told = b.describe("a")
        with pytest.raises(HandshakeRejected) as raised:
            a.connect("b", told)
        assert raised.value.field == field
        with pytest.raises(TransferError, match="not connected"):
            a.push("b", [1], [1])
        b.fence("a")


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "text"),
    [
        (("x", [1], [1]), {}, TransferError, "peer x is not connected"),
        (("b", [0], [1]), {}, PlanError, "a: block 0 is the null block"),
        (("b", [1], [0]), {}, PlanError, "peer b: block 0 is the null block"),
        (("b", [-1], [1]), {}, PlanError, "block -1"),
        (("b", [1], [1024]), {}, PlanError, "block 1024 is not among its blocks, 1 to 1023"),
        (("b", [1 << 70], [1]), {}, PlanError, "no list of numbers"),
        (("b", ["1"], [1]), {}, PlanError, "no list of numbers"),
        (("b", [1], [1023]), {}, RegionError, "no registered region"),
        (("b", [1, 2], [3, 3]), {}, PlanError, "written twice"),
        (("b", [1, 2], [3]), {}, PlanError, "different numbers of tokens"),
        (("b", [], []), {}, PlanError, "nothing to move"),
        (("b", [1], [1], range(17)), {}, PlanError, "leaves the source block table"),
        (("b", [1], [1], None, range(1, 3)), {}, PlanError, "leaves the layers"),
        (("b", [1], [1]), {"heads": range(0, 4, 2)}, PlanError, "step 1"),
        (("b", [1], [1]), {"lane": Lane("loopback", Direction.PULL)}, TransferError, "lane"),
        (("b", [1], [1]), {"lane": Lane("nixl", Direction.PUSH)}, TransferError, "nixl/push"),
    ],
)  # fmt: skip
def test_a_transfer_that_cannot_be_is_refused_and_changes_nothing(
    pair, arguments, options, kind, text
):
    a, b = pair
    before = snapshot(b)
    with pytest.raises(kind, match=text):
        a.push(*arguments, **options)
    assert a.poll() == []
    assert torch.equal(snapshot(b), before)
    a.push("b", [1], [1]).wait(TIMEOUT_S)


def test_only_the_thread_that_made_it_may_use_an_endpoint(pair):
    a, _ = pair
    errors: list[KvxferError] = []

    def use() -> None:
        for call in (a.poll, a.register, lambda: a.push("b", [1], [1]), a.close):
            try:
                call()
            except KvxferError as error:
                errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(5)
    assert len(errors) == 4
    assert all("only the thread that made it" in str(error) for error in errors)
    a.push("b", [1], [1]).wait(TIMEOUT_S)


def test_tickets_end_once_and_say_how(pair):
    a, b = pair
    ticket, other = a.push("b", [1], [2]), a.push("b", [3], [4])
    assert (ticket.done, ticket.error) == (False, None)
    assert a.poll() == [ticket, other]
    assert ticket.done
    ticket.wait(0)
    late = a.push("b", [1], [2])
    late._poll = lambda: None
    with pytest.raises(DeadlineExceeded, match="not done in 0 s"):
        late.wait(0)
    assert a.poll() == [late]
    lost = b.pull("a", [1], [2])
    b.fence("a")
    with pytest.raises(ConnectorError, match="was disconnected"):
        lost.wait(TIMEOUT_S)


def test_a_source_that_was_deregistered_ends_the_ticket_in_an_error(pair):
    a, b = pair
    pulled = b.pull("a", [1], [2])
    a.close()
    with pytest.raises(ConnectorError):
        pulled.wait(TIMEOUT_S)


def test_a_new_process_of_a_peer_takes_the_place_of_the_old(pair):
    a, b = pair
    b.close()
    with growable("b") as again:
        a.fence("b")
        meet(a, again)
        a.push("b", [1], [1]).wait(TIMEOUT_S)
        assert same(again, 1, a, 1)
        part(a, again)


def test_a_peer_that_is_described_anew_keeps_what_it_has(pair):
    a, b = pair
    grow(b)
    a.connect("b", b.describe("a"))
    a.push("b", [1], [500]).wait(TIMEOUT_S)
    b.acknowledge("a", a.apply("b", b.update()))
    told = b.revoke(64)
    with pytest.raises(KvxferError, match="revocation"):
        a.connect("b", b.describe("a"))
    with pytest.raises(MemoryPinned):
        b.release()
    b.acknowledge("a", a.apply("b", told))
    b.release()


def test_nothing_is_left_after_an_orderly_end():
    before = memfds()
    with growable("a") as a, growable("b") as b:
        meet(a, b)
        grow(b)
        b.acknowledge("a", a.apply("b", b.update()))
        a.push("b", [1], [500]).wait(TIMEOUT_S)
        for side in (a, b):
            side.check_conservation()
        assert memfds() > before
        part(a, b)
    assert memfds() == before
    a.close()
    for call in (a.poll, a.update, lambda: a.views, lambda: a.describe("b")):
        with pytest.raises(TransferError, match="endpoint a is closed"):
            call()


def test_addresses_that_a_peer_may_still_reach_stay_taken(caplog):
    before = memfds()
    with growable("a") as a, growable("b") as b:
        meet(a, b)
        view = b.views[0][0]
        b.close()
        view[1] = 1.0  # as a stale peer would: no fault, and nobody's memory
        a.fence("b")
    assert "a may still reach it" in caplog.text
    assert memfds() == before


def test_an_endpoint_that_cannot_be_made_leaves_nothing():
    before = memfds()
    with pytest.raises(UsageError, match="nonesuch"):
        growable("a", connectors=["nonesuch"])
    with pytest.raises(UsageError, match="first_head"):
        growable("a", shards=[HeadShard(2, 5)])
    with pytest.raises(UsageError, match="shards"):
        growable("a", shards=[])
    with pytest.raises(CapacityExceeded):
        growable("a", initial=2000)
    with pytest.raises(UsageError, match="device"):
        Endpoint.create("a", device="tpu", specs=[kv_spec()], layouts=[KVCacheLayout.LBHNC],
                        capacity_blocks=[8], initial_blocks=[8])  # fmt: skip
    with pytest.raises(UsageError, match="an entry a group"):
        Endpoint.create("a", device="cpu", specs=[kv_spec()], layouts=[],
                        capacity_blocks=[8], initial_blocks=[8])  # fmt: skip
    assert memfds() == before
