"""What a prefill worker says, played by the test: KV counts only with a whole proof, nothing wrong
costs the decode worker its life, and every request ends exactly once."""

import pytest
from support.prefill_wire import (
    LAYERS,
    NUM_TOKENS,
    check_never_counted,
    confirmed,
    done,
    granted,
    meet,
    ready,
    settle_all,
)

from kvxfer.control.messages import Abort, Aborted, Failed, Hello
from kvxfer.control.router_messages import Finished, Token

WRONG_DONE = [
    {"num_tokens": NUM_TOKENS - 1},
    {"num_tokens": NUM_TOKENS + 1},
    {"num_tokens": -1},
    {"num_layers": LAYERS - 1},
    {"num_layers": LAYERS + 1},
]


@pytest.mark.parametrize("changes", WRONG_DONE)
def test_a_done_that_covers_something_else_never_makes_kv_count(cluster, changes):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    wire.send(done(asked, **changes))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    check_never_counted(sent, decode)
    assert decode.peers.ready() == []
    assert decode.pools.counts().quarantined == 4
    settle_all(cluster, wire)


@pytest.mark.parametrize("grant_id", ["", "0" * 16])
def test_a_done_of_another_grant_is_not_ours(cluster, grant_id):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    wire.send(done(asked, grant_id=grant_id))
    cluster.turn_for(0.05)
    assert sent.finished is None
    check_never_counted(sent, decode)
    assert decode.pools.counts().used == 4
    wire.send(done(asked))
    cluster.finish(sent)
    assert sent.completion.output[0] == 7
    settle_all(cluster, wire)


def test_a_grant_is_used_once(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode, max_new_tokens=30)
    decode.runner.hold()
    wire.send(done(asked))
    wire.send(done(asked))
    cluster.turn_for(0.05)
    assert len(decode.peers.ready()) == 1, "it may be said twice"
    decode.runner.release()
    cluster.finish(sent)
    assert sent.finished.reason == "length"
    assert len(sent.completion.output) == 30
    settle_all(cluster, wire)


def test_done_for_nobody_is_ignored(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    wire.send(done(asked, request_id="nobody"))
    wire.send(done(asked))
    cluster.finish(sent)
    assert sent.finished.error == ""
    settle_all(cluster, wire)


def test_done_after_the_abort_ends_the_quarantine_and_counts_for_nothing(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    cluster.router.cancel(sent.completion)
    cluster.until(lambda: bool(wire.of(Abort)))
    assert decode.pools.counts().quarantined == 4
    wire.send(done(asked))
    cluster.until_idle()
    assert sent.finished.reason == "cancelled"
    check_never_counted(sent, decode)


@pytest.mark.parametrize("answer", [Aborted, Failed])
def test_quarantine_ends_with_the_answer_to_this_abort_only(cluster, answer):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode, request_id="same")
    cluster.router.cancel(sent.completion)
    cluster.finish(sent)
    other = "0" * 16
    wire.send(Failed("same", other, "why") if answer is Failed else Aborted("same", other))
    cluster.turn_for(0.05)
    assert decode.pools.counts().quarantined == 4
    grant = asked.grant.grant_id
    wire.send(Failed("same", grant, "why") if answer is Failed else Aborted("same", grant))
    cluster.until_idle()


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_failed_ends_the_request_with_its_reason(cluster, lane):
    wire, decode = meet(cluster, lane)
    sent, asked = granted(cluster, wire, decode)
    wire.send(Failed(asked.request_id, asked.grant.grant_id, "no room here"))
    cluster.finish(sent)
    assert (sent.finished.reason, sent.finished.error) == ("error", "prefill: no room here")
    cluster.until_idle()


@pytest.mark.parametrize(
    "lane, word", [("push", ready), ("push", confirmed), ("pull", done)], ids=str
)
def test_word_of_the_other_direction_never_makes_kv_count(cluster, lane, word):
    wire, decode = meet(cluster, lane)
    sent, asked = granted(cluster, wire, decode)
    wire.send(word(asked))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert decode.connector.num_submitted == 0
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


def test_each_request_gets_one_finished_whatever_is_said(cluster):
    """Failed, Aborted, Done and Failed again for one grant: the router hears one end."""
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    finished = []
    original = cluster.router._receive

    def count(letter):
        if isinstance(letter.message, Finished | Token):
            finished.append(letter.message)
        original(letter)

    cluster.router._receive = count
    grant = asked.grant.grant_id
    for message in (
        Failed(asked.request_id, grant, "first"),
        Aborted(asked.request_id, grant),
        done(asked),
        Failed(asked.request_id, grant, "last"),
    ):
        wire.send(message)
    cluster.finish(sent)
    cluster.turn_for(0.05)
    assert len(finished) == 1
    assert "first" in finished[0].error
    cluster.until_idle()


def test_an_abort_that_was_lost_is_sent_again_when_the_peer_is_back(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    cluster.router.cancel(sent.completion)
    cluster.until(lambda: len(wire.of(Abort)) == 1)
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: len(wire.of(Hello)) == 2)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: len(wire.of(Abort)) == 2)
    assert {abort.grant_id for abort in wire.of(Abort)} == {asked.grant.grant_id}
    assert decode.pools.counts().quarantined == 4
    wire.send(Aborted(asked.request_id, asked.grant.grant_id))
    cluster.until_idle()


def test_another_worker_at_the_same_address_cannot_end_a_quarantine(cluster):
    """It never heard of the grant, and says so; who has it may still write. Its own successor, or
    itself, can end it."""
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    ids = asked.request_id, asked.grant.grant_id
    cluster.router.cancel(sent.completion)
    cluster.until(lambda: len(wire.of(Abort)) == 1)
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: len(wire.of(Hello)) == 2)
    wire.send(wire.welcome("push", worker_id="other", incarnation="o"))
    cluster.until(lambda: [one.name for one in decode.peers.ready()] == ["other"])
    for word in (Aborted(*ids), Failed(*ids, "no"), done(asked)):
        wire.send(word)
    cluster.turn_for(0.1)
    assert len(wire.of(Abort)) == 1, "it is not asked either"
    assert decode.pools.counts().quarantined == 4
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: len(wire.of(Hello)) == 3)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: len(wire.of(Abort)) == 2)
    wire.send(Aborted(*ids))
    cluster.until_idle()


def test_an_unasked_aborted_ends_the_request(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    wire.send(Aborted(asked.request_id, asked.grant.grant_id))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    cluster.until_idle()
