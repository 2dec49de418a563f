"""Several connectors over the same memory: what one cannot do leaves the others as they are."""

import numpy as np
import pytest
from support.faulty import SlowLoopback

from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.multi import MultiConnector
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

SIZE = 4096
REGIONS = [Region(0, 1024), Region(1024, 1024)]


class PullOnly(SlowLoopback):
    directions = frozenset([Direction.PULL])


class Side:
    def __init__(self, name, initiates, **types):
        self.memory = np.zeros(SIZE, dtype=np.uint8)
        window = MemoryWindow(self.memory.ctypes.data, SIZE, "cpu")
        made = {key: kind(f"{name}-{key}", window) for key, kind in types.items()}
        self.multi = MultiConnector(made, initiates)
        self.base = window.base_address

    def meet(self, other, regions=REGIONS):
        return self.multi.connect("peer", other.base, other.multi.describe(regions), b"")


@pytest.fixture
def pair():
    types = {"one": SlowLoopback, "two": PullOnly}
    sides = Side("p", Direction.PUSH, **types), Side("d", Direction.PULL, **types)
    for side in sides:
        side.multi.register(REGIONS)
    yield sides
    for side in sides:
        side.multi.close()


def plan():
    column = np.array([8], dtype=np.int64)
    return TransferPlan.of_runs(column, column + 1024, column)


def ended(side):
    results = []
    while not results:
        results = side.multi.poll()
    return results


def test_each_lane_moves_by_its_own_connector_and_tickets_stay_apart(pair):
    prefill, decode = pair
    prefill.memory[8:16] = 7
    assert decode.meet(prefill) == {"one", "two"}
    tickets = [decode.multi.submit("peer", Lane(n, Direction.PULL), plan()) for n in ("one", "two")]
    assert len(set(tickets)) == 2
    assert {r.ticket for r in ended(decode)} == set(tickets)
    assert (decode.memory[1032:1040] == 7).all()


def test_who_starts_no_transfers_by_a_connector_does_not_learn_the_peer_by_it(pair):
    prefill, decode = pair
    assert prefill.meet(decode) == {"one"}
    with pytest.raises(ConnectorError, match="two/push"):
        prefill.multi.submit("peer", Lane("two", Direction.PUSH), plan())


def test_a_peer_that_only_the_other_side_starts_transfers_with_is_met_all_the_same():
    prefill, decode = (
        Side("p", Direction.PUSH, two=PullOnly),
        Side("d", Direction.PULL, two=PullOnly),
    )
    for side in (prefill, decode):
        side.multi.register(REGIONS)
    assert prefill.meet(decode) == set()
    assert decode.meet(prefill) == {"two"}
    decode.multi.submit("peer", Lane("two", Direction.PULL), plan())
    ended(decode)
    for side in (prefill, decode):
        side.multi.close()


def test_a_connector_that_cannot_reach_a_new_peer_is_left_out(pair, caplog):
    prefill, decode = pair
    decode.multi.connectors["two"].refuse.add("connect")
    assert decode.meet(prefill) == {"one"}
    assert "connect" in caplog.text
    decode.multi.connectors["one"].refuse.add("connect")
    with pytest.raises(ConnectorError):
        decode.multi.connect("other", prefill.base, prefill.multi.describe([]), b"")


def test_one_that_fails_to_learn_more_of_a_peer_it_knows_is_an_error(pair):
    prefill, decode = pair
    decode.meet(prefill, REGIONS[:1])
    decode.multi.connectors["two"].refuse.add("connect")
    with pytest.raises(ConnectorError):
        decode.meet(prefill)


def test_a_registration_that_one_refuses_is_nobodys(pair):
    prefill, _ = pair
    more = [Region(2048, 64)]
    prefill.multi.connectors["two"].refuse.add("register")
    with pytest.raises(ConnectorError):
        prefill.multi.register(more)
    assert more[0] not in prefill.multi.connectors["one"]._regions.regions


@pytest.mark.parametrize("description", [b"", b"\x01", b"\x80", b"\x81\xa3odd\xc4\x00"])
def test_a_description_of_nothing_that_we_know_is_refused(pair, description):
    with pytest.raises(ConnectorError):
        pair[1].multi.connect("peer", 0, description)


def test_an_unknown_lane_is_refused(pair):
    prefill, decode = pair
    decode.meet(prefill)
    with pytest.raises(ConnectorError, match="pigeon/pull"):
        decode.multi.submit("peer", Lane("pigeon", Direction.PULL), plan())


class Impossible(SlowLoopback):
    def __init__(self, agent_name, memory):
        raise ConnectorError("not on this machine")


def opened(all_needed, **types):
    window = MemoryWindow(1 << 20, SIZE, "cpu")
    return MultiConnector.open(types, "me", window, Direction.PULL, all_needed)


def test_what_cannot_be_had_is_left_out_unless_it_was_asked_for(caplog):
    found = opened(False, one=Impossible, two=SlowLoopback)
    assert list(found.connectors) == ["two"]
    assert "one connector is left out: not on this machine" in caplog.text
    found.close()
    with pytest.raises(ConnectorError, match="not on this machine"):
        opened(True, one=Impossible, two=SlowLoopback)
    with pytest.raises(ConnectorError, match="not on this machine"):
        opened(False, one=Impossible)
    opened(True, two=SlowLoopback).close()  # nothing of it was left behind
