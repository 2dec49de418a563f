"""The lanes of a pair: which there are, and which comes first as far as that is known."""

import itertools

import pytest

from connectors.loopback import LoopbackConnector
from kvxfer.errors import HandshakeRejected, WireError
from kvxfer.transfer.connector import Direction, MemoryWindow, Where
from kvxfer.transfer.lanes import Lane, LaneSide, candidates, offered, served

NAMES = ["nixl/push", "nixl/pull", "peer/pull"]


def side(*lanes, host="one", device="cpu", local=()):
    named = tuple(map(Lane.parse, lanes or NAMES))
    return LaneSide(named, host, device, frozenset(map(Lane.parse, local)))


def names(ours, theirs):
    found = [str(lane) for lane in candidates(ours, theirs)]
    assert found == [str(lane) for lane in candidates(theirs, ours)]
    return found


def test_mapping_the_peers_pages_comes_first_on_one_host_and_never_between_two():
    assert names(side(), side()) == ["peer/pull", "nixl/push", "nixl/pull"]
    assert names(side(), side(host="two")) == ["nixl/push", "nixl/pull"]


def test_what_either_side_serves_on_one_host_only_is_no_lane_between_two():
    near = side(local=["nixl/pull"])
    assert names(near, side()) == ["peer/pull", "nixl/push", "nixl/pull"]
    assert names(near, side(host="two")) == ["nixl/push"]


class TcpAlone(LoopbackConnector):
    reads_from = frozenset()


class NearReader(LoopbackConnector):
    reads_from = frozenset({Where.HOST})


def test_nothing_is_read_that_its_owner_would_have_to_send():
    memory = MemoryWindow(4096, 4096, "cpu")
    made = {
        name: kind(f"lanes-{name}", memory)
        for name, kind in (("a", TcpAlone), ("b", NearReader), ("c", LoopbackConnector))
    }
    lanes = offered(made, "auto")
    assert len(lanes) == 6
    here, apart = (set(map(str, served(made, lanes, where))) for where in Where)
    assert here == {"a/push", "b/push", "b/pull", "c/push", "c/pull"}
    assert apart == here - {"b/pull"}
    for one in made.values():
        one.close()


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cpu", "cuda:1"), ("cuda:0", "cuda:0")])
def test_gpus_are_pulled_from_before_they_are_pushed_to(devices):
    ours, theirs = (side(*NAMES[:2], device=device) for device in devices)
    assert names(ours, theirs) == ["nixl/pull", "nixl/push"]


def test_only_what_both_offer_is_left():
    both = list(itertools.product(["nixl/push", "nixl/pull"], repeat=1))
    for (lane,) in both:
        assert names(side(), side(lane)) == [lane]


REFUSED = {
    "connector": (side("nixl/push"), side("peer/pull")),
    "lane": (side("nixl/push"), side("nixl/pull")),
    "host": (side("peer/pull"), side("peer/pull", host="two")),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_leaves_no_lane_is_named(field):
    ours, theirs = REFUSED[field]
    for one, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(HandshakeRejected) as refused:
            candidates(one, other)
        assert refused.value.field == field


@pytest.mark.parametrize("text", ["", "nixl", "nixl/", "/push", "nixl/sideways", "nixl/push/x"])
def test_what_is_no_lane_is_refused(text):
    with pytest.raises(WireError):
        Lane.parse(text)


def test_a_user_may_ask_for_one_direction():
    ours = {"loopback": LoopbackConnector}
    assert offered(ours, "auto") == [Lane("loopback", direction) for direction in Direction]
    assert offered(ours, "pull") == [Lane("loopback", Direction.PULL)]
