"""A word of a lane trial that is lost, late or repeated costs some time, and no block."""

import pytest

from decode import lane_trials
from kvxfer.control.lane_messages import LaneChosen, LanePush, LanePushed, LaneReady, LaneTrial
from kvxfer.control.messages import Hello, RegionsAck, Welcome
from kvxfer.errors import ControlError
from kvxfer.transfer.connector import Direction
from kvxfer.worker.lane_trial import NUM_TRANSFERS

TRIAL = LaneTrial("t" * 16, 8, [1, 2])
PUSH = LanePush(TRIAL.trial_id, "loopback/push", 8)
slow = pytest.mark.slow
OPTIONS = {"lane": "push", "lane_test": True}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(lane_trials, "ASK_PAUSE_S", 0.05)


def both_ready(*workers):
    return lambda: all(worker.peers.ready() for worker in workers)


def idle_pair(cluster, **changes):
    prefill, decode = (cluster.add(role, **OPTIONS, **changes) for role in ("prefill", "decode"))
    decode.peers.dial(prefill.address)
    return prefill, decode


@pytest.mark.parametrize("kind", [LaneTrial, LaneReady, LanePush, LanePushed])
def test_a_lost_message_of_a_trial_is_made_up_for(cluster, losing, kind):
    left = losing(kind, count=2)
    prefill, decode = idle_pair(cluster)
    cluster.until(both_ready(prefill, decode), 4.0)
    assert left[kind] == 0
    assert decode.peers.ready()[0].lane_gbps > 0, "it was tried"
    cluster.until_idle()


@pytest.mark.parametrize(
    "kind",
    [
        LaneTrial,
        LanePush,
        *(pytest.param(kind, marks=slow) for kind in (LaneReady, LanePushed, LaneChosen)),
    ],
)
def test_a_message_that_comes_twice_changes_nothing(cluster, repeating, kind):
    repeating(kind)
    prefill, decode = idle_pair(cluster)
    cluster.until(both_ready(prefill, decode))
    cluster.turn_for(0.05)
    first_and_all = 2
    assert prefill.connector.num_submitted == first_and_all * NUM_TRANSFERS, "each pushed once"
    sent = cluster.send(decode, 24, 5)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


def trying(decode):
    """Its trial, once prefill was asked to push."""
    found = [one for one in decode.role._lane_trials._trials.values() if one.is_written]
    return found[0] if found else None


@pytest.mark.parametrize("lost", [pytest.param(LanePush, marks=slow), LanePushed])
@pytest.mark.parametrize("has_room", [True, False], ids=["tried again", "not now"])
def test_blocks_of_a_push_that_nobody_answered_for_come_back(
    cluster, losing, monkeypatch, lost, has_room
):
    """Both live on, and lose each other in the middle: the new session owes the old one's word."""
    left = losing(lost, count=1_000_000)
    prefill, decode = idle_pair(cluster)
    cluster.until(lambda: trying(decode) is not None)
    cluster.turn_for(0.1)
    with monkeypatch.context() as full:
        if not has_room:
            full.setattr(prefill.pools, "can_allocate", lambda needed: False)
        decode.peers.lose(next(iter(decode.peers._peers)), "the test says so")
        assert decode.pools.counts().quarantined > 0
        left[lost] = 0
        cluster.until(both_ready(prefill, decode))
    assert (decode.peers.ready()[0].lane_gbps > 0) == has_room
    cluster.until(lambda: decode.pools.counts().quarantined == 0, 4.0)
    cluster.until_idle()


def test_prefill_that_loses_decode_in_the_middle_of_a_push_says_how_it_ended(cluster):
    prefill, decode = idle_pair(cluster)
    prefill.connector.moving.clear()
    cluster.until(lambda: prefill.connector.num_submitted > 0)
    trial = trying(decode)
    prefill.peers.lose(next(iter(prefill.peers._peers)), "the test says so")
    cluster.until(lambda: trial.is_over)
    cluster.turn_for(0.2)
    assert trial.is_written, "a push is under way"
    assert decode.pools.counts().quarantined > 0
    prefill.connector.moving.set()
    cluster.until(both_ready(prefill, decode))
    cluster.until(lambda: not trial.is_written, 4.0)
    cluster.until_idle()


def met(cluster):
    """Prefill, and a wire that it takes for a decode worker which is about to try lanes."""
    prefill, wire = cluster.add("prefill", **OPTIONS), cluster.wire("decode", **OPTIONS)
    wire.dial(prefill)
    cluster.until(lambda: wire.says(wire.hello()))
    cluster.until(lambda: bool(wire.of(Welcome)))
    return prefill, wire


def answers(cluster, wire, kind, count):
    cluster.until(lambda: len(wire.of(kind)) >= count)
    return wire.of(kind)[count - 1]


def test_after_its_end_a_trial_is_neither_begun_nor_pushed_for_again(cluster):
    """What comes late may have been under way for long: those blocks are others' now."""
    prefill, wire = met(cluster)
    wire.send(TRIAL)
    assert answers(cluster, wire, LaneReady, 1).blocks
    wire.send(PUSH)
    assert not answers(cluster, wire, LanePushed, 1).error
    pushed = prefill.connector.num_submitted
    wire.send(PUSH)
    assert answers(cluster, wire, LanePushed, 2) == wire.of(LanePushed)[0]
    wire.send(LaneChosen(TRIAL.trial_id, PUSH.lane, 1.0, [PUSH.lane]))
    cluster.until(lambda: prefill.pools.counts().used == 0)
    wire.send(TRIAL)
    assert not answers(cluster, wire, LaneReady, 2).blocks
    wire.send(PUSH)
    assert "over" in answers(cluster, wire, LanePushed, 3).error
    assert prefill.connector.num_submitted == pushed
    assert prefill.pools.counts().used == 0
    assert prefill.peers.ready(), "a late word is no wrong one"


def test_a_trial_that_decode_gave_up_before_it_came_is_not_begun(cluster):
    prefill, wire = met(cluster)
    wire.send(LaneChosen(TRIAL.trial_id, PUSH.lane, 0.0, []))
    wire.send(TRIAL)
    assert not answers(cluster, wire, LaneReady, 1).blocks
    assert prefill.pools.counts().used == 0


def test_the_answer_to_one_push_is_not_taken_for_that_to_the_next(cluster):
    """The second one moves all: an answer to the first few that comes again ends nothing of it."""
    wire, decode = cluster.wire("prefill", "tcp://127.0.0.1:0", **OPTIONS), None
    decode = cluster.add("decode", **OPTIONS)
    decode.peers.dial(wire.address)
    cluster.until(lambda: bool(wire.of(Hello)))
    wire.send(wire.welcome("push"))
    asked = answers(cluster, wire, LaneTrial, 1)
    wire.send(LaneReady(asked.trial_id, list(range(1, len(asked.blocks) + 1))))
    first = answers(cluster, wire, LanePush, 1)
    told = LanePushed(first.trial_id, first.lane, first.num_tokens, 1000, "")
    wire.send(told)
    cluster.until(lambda: wire.of(LanePush)[-1].num_tokens > first.num_tokens)
    wire.send(told)
    cluster.turn_for(0.1)
    assert trying(decode) is not None, "the second push is still waited for"


def test_nobody_but_the_worker_that_was_asked_to_push_can_say_that_it_did(cluster, losing):
    """Another worker at the same address: it knows nothing of the one that may still write."""
    left = losing(LanePushed, count=1_000_000)
    prefill, decode = idle_pair(cluster)
    cluster.until(lambda: trying(decode) is not None)
    trial, address = trying(decode), prefill.address
    cluster.turn_for(0.05)
    cluster.remove(prefill)
    decode.peers.lose(trial.peer.key, "the test says so")
    left[LanePushed] = 0
    other = cluster.add("prefill", listen=address, worker_id="other", **OPTIONS)
    cluster.until(both_ready(other, decode))
    cluster.turn_for(0.1)
    assert trial.is_written
    assert decode.pools.counts().quarantined > 0
    cluster.remove(other)
    decode.peers.lose(trial.peer.key, "the test says so")
    again = cluster.add("prefill", listen=address, **OPTIONS)
    cluster.until(both_ready(again, decode))
    cluster.until_idle()


def test_the_direction_of_these_tests_is_push():
    assert PUSH.lane.endswith(str(Direction.PUSH))


def test_a_peer_lost_by_the_word_before_its_trial_is_not_tried(cluster, monkeypatch):
    """Its key may be that of a new session by the time: blocks of the trial would be nobody's."""
    prefill, decode = (cluster.add(role, **OPTIONS) for role in ("prefill", "decode"))
    send, failures = decode.peers._channel.send, []

    def breaking(key, message):
        if isinstance(message, RegionsAck) and not failures:
            failures.append(key)
            raise ControlError("the connection broke")
        send(key, message)

    monkeypatch.setattr(decode.peers._channel, "send", breaking)
    decode.peers.dial(prefill.address)
    cluster.until(both_ready(prefill, decode), 8.0)
    assert failures
    cluster.until_idle()
