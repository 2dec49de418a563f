"""What is told of regions may be lost, doubled or late; peers that forgot each other meet again."""

from typing import ClassVar

import pytest
from support.peering import Events, both_ready, idle_pair

from kvxfer.control.cache_messages import RegionsRevoke, RegionsRevoked
from kvxfer.control.channel import Channel
from kvxfer.control.messages import Heartbeat, RegionsAck, RegionsUpdate, Welcome
from kvxfer.control.resync_messages import HelloWanted, RegionsAt, RegionsQuery, RegionsState
from kvxfer.worker.liveness import HELLO_JITTER, HELLO_RETRY_MAX_S, HELLO_RETRY_S, hello_pause

ELASTIC = {
    "kv_commit": "elastic",
    "kv_initial_blocks": 8,
    "engine": {"capacity": 256},
    "peer_timeout_s": 3.0,
}


@pytest.fixture
def sending(monkeypatch):
    """Set `.change`: what is sent instead of a message."""

    class Sending:
        change = staticmethod(lambda message: [message])
        sent: ClassVar[list] = []

    original = Channel.send

    def send(self, peer, message):
        for one in Sending.change(message):
            Sending.sent.append(one)
            original(self, peer, one)

    monkeypatch.setattr(Channel, "send", send)
    return Sending


def lose_first(kind, count=1):
    left = [count]

    def change(message):
        if isinstance(message, kind) and left[0]:
            left[0] -= 1
            return []
        return [message]

    return change


def in_step(worker, other):
    def check():
        peers = other.peers.ready()
        regions = worker.parts.growth.regions
        return (
            bool(peers)
            and peers[0].regions == regions
            and peers[0].epoch == worker.parts.growth.epoch
            and other.connector._peers[peers[0].key].regions.regions == regions.regions
        )

    return check


@pytest.mark.parametrize("kind", [RegionsUpdate, RegionsAck, RegionsQuery, RegionsState])
@pytest.mark.parametrize("grower", ["prefill", "decode"])
def test_a_lost_word_of_growth_costs_no_session(cluster, sending, kind, grower):
    prefill, decode = idle_pair(cluster, **ELASTIC)
    cluster.until(both_ready(prefill, decode))
    worker, other = (prefill, decode) if grower == "prefill" else (decode, prefill)
    seen = Events(worker), Events(other)
    sending.change = lose_first(kind)
    for wanted in (20, 50):
        worker.parts.growth.request([wanted])
        cluster.until(lambda w=wanted: worker.pools.num_blocks[0] >= w)
    cluster.until(in_step(worker, other))
    assert [one.lost for one in seen] == [[], []]


@pytest.mark.parametrize("kind", [RegionsRevoke, RegionsRevoked])
def test_a_lost_word_of_a_revocation_costs_no_session(cluster, sending, kind):
    prefill, decode = idle_pair(cluster, **ELASTIC)
    cluster.until(both_ready(prefill, decode))
    prefill.parts.growth.request([60])
    cluster.until(lambda: prefill.pools.num_blocks[0] >= 60)
    seen = Events(prefill), Events(decode)
    sending.change = lose_first(kind)
    answers = []
    prefill.parts.residency.shrink([8], 5.0, answers.append)
    cluster.until(lambda: bool(answers))
    assert answers[0].problem == ""
    cluster.until(in_step(prefill, decode))
    assert decode.peers.ready()[0].epoch == 1
    assert [one.lost for one in seen] == [[], []]


def test_an_update_that_never_comes_shows_in_the_heartbeats(cluster, sending):
    """Its owner believes that it was loaded: no repetition helps, only the question."""
    prefill, decode = idle_pair(cluster, **ELASTIC)
    cluster.until(both_ready(prefill, decode))
    sending.change = lambda m: [] if isinstance(m, RegionsUpdate) else [m]
    prefill.parts.growth.request([60])
    cluster.until(lambda: prefill.parts.growth.regions.generation == 2)
    prefill.peers.ready()[0].acked_generation = 2
    cluster.until(in_step(prefill, decode))
    kinds = [type(one) for one in sending.sent]
    assert RegionsQuery in kinds
    assert RegionsState in kinds


def test_words_that_come_twice_or_late_change_nothing(cluster, sending):
    """Every update, revocation and answer is said again after the next two."""
    prefill, decode = idle_pair(cluster, **ELASTIC)
    cluster.until(both_ready(prefill, decode))
    seen = Events(prefill), Events(decode)
    held = []

    def change(message):
        kinds = (RegionsUpdate, RegionsRevoke, RegionsState, RegionsAck, RegionsRevoked, RegionsAt)
        if not isinstance(message, kinds):
            return [message]
        held.append(message)
        again = [held.pop(0)] if len(held) > 2 else []
        return [message, *[one for one in again if type(one) is type(message)]]

    sending.change = change
    for wanted in (30, 60):
        prefill.parts.growth.request([wanted])
        cluster.until(lambda w=wanted: prefill.pools.num_blocks[0] >= w)
        answers = []
        prefill.parts.residency.shrink([8], 5.0, answers.append)
        cluster.until(lambda a=answers: bool(a))
        assert answers[0].problem == ""
    cluster.until(in_step(prefill, decode))
    assert [one.lost for one in seen] == [[], []]


# --- sessions -------------------------------------------------------------------------------------


def test_a_peer_that_was_lost_on_one_side_only_is_met_again_at_its_next_heartbeat(cluster):
    prefill, decode = idle_pair(cluster, peer_timeout_s=3.0)
    cluster.until(both_ready(prefill, decode))
    seen = Events(decode)
    prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: bool(seen.lost), timeout_s=2.0)
    assert "does not know us any more" in seen.lost[0][1]
    cluster.until(both_ready(prefill, decode), timeout_s=2.0)
    assert seen.fenced == []


def test_hello_wanted_while_it_is_greeted_changes_nothing(cluster, sending):
    prefill, decode = idle_pair(cluster)
    sending.change = lambda m: [HelloWanted(), m] if isinstance(m, Welcome) else [m]
    seen = Events(decode)
    cluster.until(both_ready(prefill, decode))
    cluster.turn_for(0.05)
    assert seen.lost == []


def test_word_of_an_incarnation_that_is_over_is_believed_no_more(cluster):
    prefill = cluster.add("prefill", idle=True)
    old, new = (cluster.wire("decode") for _ in range(2))
    for wire in (old, new):
        wire.dial(prefill)
        cluster.until(lambda w=wire: w.says(Heartbeat()))
        wire.send(wire.hello())
        cluster.until(lambda w=wire: bool(w.of(Welcome)))
    old.send(old.hello())
    cluster.until(lambda: any(getattr(m, "field", "") == "incarnation" for m in old.received))
    (peer,) = prefill.peers.ready()
    assert peer.facts.incarnation == new.incarnation


def test_a_welcome_of_an_older_process_does_not_fence_the_new_one(cluster, sending):
    kept = []

    def keep(message):
        if isinstance(message, Welcome):
            kept.append(message)
        return [message]

    sending.change = keep
    prefill, decode = idle_pair(cluster, peer_timeout_s=3.0)
    cluster.until(both_ready(prefill, decode))
    address = prefill.address
    cluster.remove(prefill)
    again = cluster.add("prefill", idle=True, listen=address, peer_timeout_s=3.0)
    cluster.until(lambda: bool(again.peers.ready()) and bool(decode.peers.ready()))
    seen = Events(decode)
    again.channel.send(again.peers.ready()[0].key, kept[0])
    cluster.turn_for(0.1)
    assert (seen.lost, seen.fenced) == ([], [])
    assert decode.peers.ready()[0].facts.incarnation == again.incarnation


def test_two_that_go_by_one_worker_id_are_not_taken_for_one(cluster):
    first = cluster.add("prefill", idle=True)
    second = cluster.add("prefill", idle=True)
    decode = cluster.add("decode", idle=True)
    seen = Events(decode)
    for worker in (first, second):
        decode.peers.dial(worker.address)
        cluster.until(lambda w=worker: bool(w.peers.ready() or decode.peers.ready()))
    cluster.turn_for(0.3)
    assert len(decode.peers.ready()) == 1
    assert seen.fenced == []


@pytest.mark.parametrize("num_sent, longest", [(1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (99, 5.0)])
def test_greetings_come_later_and_later_and_not_all_at_once(num_sent, longest):
    assert HELLO_RETRY_S == 1.0
    assert HELLO_RETRY_MAX_S == 5.0
    assert hello_pause(num_sent, 0.0) == pytest.approx(longest * (1 - HELLO_JITTER))
    assert hello_pause(num_sent, 0.5) == pytest.approx(longest)
    assert hello_pause(num_sent, 0.999) < longest * (1 + HELLO_JITTER)


@pytest.mark.parametrize("rounds", [["decode"] * 3, ["prefill"] * 3, ["prefill", "decode"] * 2])
def test_either_side_restarts_again_and_again(cluster, rounds):
    """The other one goes on as it is; each new process is known for what it is."""
    quick = {"idle": True, "peer_timeout_s": 3.0}
    prefill, decode = idle_pair(cluster, peer_timeout_s=3.0)
    address = prefill.address
    cluster.until(both_ready(prefill, decode))
    for role in rounds:
        if role == "prefill":
            cluster.remove(prefill)
            prefill = cluster.add("prefill", listen=address, **quick)
        else:
            cluster.remove(decode)
            decode = cluster.add("decode", **quick)
            decode.peers.dial(address)
        pair = prefill, decode
        cluster.until(
            lambda p=pair: all(
                [q.facts.incarnation for q in one.peers.ready()] == [other.incarnation]
                for one, other in (p, p[::-1])
            )
        )
