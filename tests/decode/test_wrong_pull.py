"""Pull, with a prefill worker that says something else than it should: KV counts only when all of
it was read under one unbroken lease."""

import pytest
from support.prefill_wire import (
    NUM_TOKENS,
    check_never_counted,
    confirmed,
    done,
    granted,
    meet,
    ready,
    settle_all,
)

from kvxfer.control.messages import Failed, Hello, Taken
from kvxfer.control.resync_messages import GrantQuery

IMPOSSIBLE = {
    "empty": (0, 0, [(0, 2)]),
    "backwards": (8, 4, [(0, 2)]),
    "too far": (0, NUM_TOKENS + 1, [(0, 2)]),
    "negative": (-4, 4, [(0, 2)]),
    "no layers": (0, 8, [(0, 0)]),
    "too many layers": (0, 8, [(0, 3)]),
    "layers backwards": (0, 8, [(0, -1)]),
    "layers of no group": (0, 8, []),
    "layers of two groups": (0, 8, [(0, 2), (0, 2)]),
}


@pytest.mark.parametrize("offer", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_ready_fails_the_request(cluster, offer):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    start, stop, layers = offer
    wire.send(ready(asked, start, stop, False, layers=layers))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert "no part of the prompt" in sent.finished.error
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


ALL, FIRST_LAYER, LAST_LAYER = [(0, 2)], [(0, 1)], [(1, 2)]
SKIPPING = {
    "tokens": ([], (4, 8, ALL)),
    "overlap": ([(0, 8, ALL)], (4, 10, ALL)),
    "layers": ([], (0, 8, LAST_LAYER)),
    "other tokens before the rest": ([(0, 8, FIRST_LAYER)], (0, 4, LAST_LAYER)),
    "next tokens before the rest": ([(0, 8, FIRST_LAYER)], (8, 10, ALL)),
}


@pytest.mark.parametrize("before, offer", SKIPPING.values(), ids=SKIPPING)
def test_what_was_skipped_is_asked_for_and_nothing_after_it_is_read(cluster, before, offer):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    for start, stop, layers in [*before, offer]:
        wire.send(ready(asked, start, stop, False, layers=layers))
    cluster.until(lambda: bool(wire.of(GrantQuery)))
    assert decode.connector.num_submitted == len(before)
    query = wire.of(GrantQuery)[0]
    start, first = query.tokens_read, query.layers_read or [0]
    if first[0]:
        wire.send(ready(asked, start, query.stretch_end, False, layers=[(first[0], 2)]))
        start = query.stretch_end
    wire.send(ready(asked, start, NUM_TOKENS))
    cluster.until(lambda: bool(wire.of(Taken)))
    wire.send(confirmed(asked))
    cluster.finish(sent)
    assert sent.finished.error == ""
    settle_all(cluster, wire)


@pytest.mark.parametrize("layers", [ALL, FIRST_LAYER], ids=["whole", "layer"])
def test_what_was_offered_before_is_not_read_again(cluster, layers):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    for _ in range(3):
        wire.send(ready(asked, 0, 8, False, layers=layers))
    cluster.until(lambda: decode.connector.num_submitted == 1)
    cluster.turn_for(0.03)
    assert decode.connector.num_submitted == 1
    cluster.router.cancel(sent.completion)
    settle_all(cluster, wire)


def test_a_final_offer_without_the_last_layers_fails_the_request(cluster):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked, layers=[(0, 1)]))
    cluster.finish(sent)
    assert "final before all was offered" in sent.finished.error
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


WRONG_BLOCKS = [
    [[0, 1, 2]],
    [[1, 2]],
    [[1, 2, 64]],
    [[1, 2, -1]],
    [[1, 2, 2**63]],
    [[1, 2, 2**64 - 1]],
    [[1, 2, 2]],
    [],
    [[1, 2, 3], [1, 2, 3]],
]


@pytest.mark.parametrize("blocks", WRONG_BLOCKS)
def test_a_lease_of_impossible_blocks_fails_the_request(cluster, blocks):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked, blocks=blocks))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


def test_a_lease_of_blocks_that_are_not_registered_fails_the_request(cluster):
    wire = cluster.wire("prefill", "tcp://127.0.0.1:0", lane="pull")
    decode = cluster.add("decode", lane="pull")
    decode.peers.dial(wire.address)
    cluster.until(lambda: bool(wire.of(Hello)))
    known = wire.regions.regions[:1]
    told = wire.connector.describe(known)
    wire.send(wire.welcome("pull", regions=list(known), description=told))
    cluster.until(lambda: bool(decode.peers.ready()))
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked))
    cluster.finish(sent)
    assert "no registered region" in sent.finished.error
    settle_all(cluster, wire)


def test_confirmed_before_all_was_read_never_makes_kv_count(cluster):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked, 0, 8, final=False))
    wire.send(confirmed(asked))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    check_never_counted(sent, decode)
    settle_all(cluster, wire)


def test_confirmed_while_a_read_is_in_flight_never_makes_kv_count(cluster):
    wire, decode = meet(cluster, "pull")
    decode.connector.moving.clear()
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked))
    wire.send(confirmed(asked))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    cluster.turn_for(0.05)
    assert decode.pools.counts().quarantined == 4, "our own read may still write"
    decode.connector.moving.set()
    settle_all(cluster, wire)
    check_never_counted(sent, decode)


def test_a_broken_lease_is_answered_with_failed_and_the_kv_is_dropped(cluster):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked))
    cluster.until(lambda: bool(wire.of(Taken)))
    wire.send(Failed(asked.request_id, asked.grant.grant_id, "the lease was broken"))
    cluster.finish(sent)
    assert "lease was broken" in sent.finished.error
    check_never_counted(sent, decode)
    cluster.until_idle()


def test_a_confirmation_under_another_lease_is_not_ours(cluster):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked, lease_id="1" * 16))
    cluster.turn_for(0.03)
    assert decode.connector.num_submitted == 0
    wire.send(ready(asked))
    cluster.until(lambda: bool(wire.of(Taken)))
    wire.send(confirmed(asked, lease_id="1" * 16))
    cluster.turn_for(0.03)
    assert sent.finished is None
    wire.send(confirmed(asked))
    cluster.finish(sent)
    assert sent.finished.error == ""
    cluster.until_idle()


@pytest.mark.parametrize("late", [ready, confirmed, done])
@pytest.mark.parametrize("verify_held", [True, False], ids=["digesting", "running"])
def test_word_of_a_hand_over_that_is_over_changes_nothing(cluster, late, verify_held):
    """It may have been said twice, or have come late."""
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode, max_new_tokens=12)
    wire.send(ready(asked))
    cluster.until(lambda: bool(wire.of(Taken)))
    if verify_held:
        decode.runner.hold()
    wire.send(confirmed(asked))
    cluster.until(lambda: len(sent.completion.output) >= (1 if verify_held else 2))
    wire.send(late(asked))
    cluster.turn_for(0.03)
    decode.runner.release()
    cluster.finish(sent)
    assert (sent.finished.reason, sent.finished.error) == ("length", "")
    assert len(sent.completion.output) == 12
    assert len(decode.peers.ready()) == 1
    settle_all(cluster, wire)
