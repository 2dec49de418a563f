"""The first token is told as soon as prefill has it, once, and is no proof of any KV."""

import msgspec
import pytest
from support.prefill_wire import (
    FIRST,
    check_never_counted,
    confirmed,
    done,
    first_token,
    granted,
    meet,
    ready,
    settle_all,
)

from kvxfer.control.messages import Abort, Failed, Taken

LANES = ["push", "pull"]


def ask(cluster, wire, decode, **more):
    """As `granted`, before the first token is told."""
    asked = []
    sent, _ = granted(cluster, wire, decode, tell=asked.append, **more)
    return sent, asked[0]


def hand_over(cluster, wire, lane, asked, **changes):
    """All KV, to its proof, of which `changes` are other fields."""
    if lane == "push":
        wire.send(done(asked, **changes))
        return
    wire.send(ready(asked))
    cluster.until(lambda: bool(wire.of(Taken)))
    wire.send(msgspec.structs.replace(confirmed(asked), **changes))


@pytest.mark.parametrize("lane", LANES)
def test_it_is_told_before_any_kv_has_travelled(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, _ = granted(cluster, wire, decode)
    assert sent.completion.output == [FIRST]
    assert decode.connector.num_submitted == 0
    assert decode.runner.batch_sizes == []
    cluster.router.cancel(sent.completion)
    cluster.finish(sent)
    settle_all(cluster, wire)


@pytest.mark.parametrize("lane", LANES)
def test_prefill_that_fails_after_it_ends_the_request_with_the_reason(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = granted(cluster, wire, decode)
    wire.send(Failed(asked.request_id, asked.grant.grant_id, "out of luck"))
    cluster.finish(sent)
    assert "out of luck" in sent.finished.error
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


@pytest.mark.parametrize("token", [-1, 1 << 40])
@pytest.mark.parametrize("lane", LANES)
def test_a_token_outside_the_vocabulary_costs_the_peer(cluster, lane, token):
    wire, decode = meet(cluster, lane)
    sent, asked = ask(cluster, wire, decode)
    wire.send(first_token(asked, token))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert sent.completion.output == []
    settle_all(cluster, wire)


@pytest.mark.parametrize("lane", LANES)
def test_it_may_be_told_twice_and_is_passed_on_once(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = granted(cluster, wire, decode)
    wire.send(first_token(asked))
    cluster.turn_for(0.03)
    assert sent.completion.output == [FIRST]
    assert len(decode.peers.ready()) == 1
    cluster.router.cancel(sent.completion)
    settle_all(cluster, wire)


@pytest.mark.parametrize("lane", LANES)
def test_another_first_token_costs_the_peer(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = granted(cluster, wire, decode)
    wire.send(first_token(asked, FIRST + 1))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


@pytest.mark.parametrize("lane", LANES)
def test_where_it_was_lost_the_end_of_the_hand_over_tells_it(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = ask(cluster, wire, decode)
    hand_over(cluster, wire, lane, asked)
    cluster.finish(sent)
    assert (sent.finished.reason, sent.completion.output[0]) == ("length", FIRST)
    wire.send(first_token(asked))
    settle_all(cluster, wire)


@pytest.mark.parametrize("lane", LANES)
def test_an_end_of_the_hand_over_that_tells_another_never_counts(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = granted(cluster, wire, decode)
    hand_over(cluster, wire, lane, asked, first_token=FIRST + 1)
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


@pytest.mark.parametrize("lane", LANES)
def test_of_a_request_that_was_given_up_it_is_told_nobody(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = ask(cluster, wire, decode)
    cluster.router.cancel(sent.completion)
    cluster.finish(sent)
    cluster.until(lambda: bool(wire.of(Abort)))
    wire.send(first_token(asked))
    cluster.turn_for(0.03)
    assert sent.completion.output == []
    assert len(decode.peers.ready()) == 1
    settle_all(cluster, wire)
