"""Digests of KV at both ends of a hand-over: equal where all is well, and a failed request where
it is not."""

import pytest
from support.faulty import SlowLoopback
from support.prefill_wire import confirmed, done, granted, meet, ready

from kvxfer.control.messages import PrefillRequest, Taken
from kvxfer.transfer.plan import TransferPlan

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
ALWAYS = {"kv_digest": "always"}


@both_lanes
@pytest.mark.parametrize("layouts", [("LBHNC", "BLNHC"), ("BHLNC", "LHBNC")])
def test_equal_kv_has_equal_digests_whatever_the_layouts(cluster, lane, layouts):
    engines = [{"engine": {"layout": layout}} for layout in layouts]
    _, decode = cluster.pair(lane, prefill=engines[0], decode=engines[1] | ALWAYS)
    sent = [cluster.send(decode, num_tokens=n) for n in (1, 4, 19)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


class LosesABlock(SlowLoopback):
    """Loopback that leaves out the last start of each box, and says that it is done."""

    def submit(self, peer, direction, plan):
        runs = [plan.src_offsets[:-1], plan.dst_offsets[:-1], plan.sizes[:-1]]
        return super().submit(peer, direction, TransferPlan.of_runs(*runs))


@both_lanes
def test_kv_that_did_not_all_arrive_fails_the_request_and_nothing_else(cluster, lane):
    prefill, decode = cluster.pair(lane, decode=ALWAYS)
    mover = prefill if lane == "push" else decode
    mover.connector.__class__ = LosesABlock
    sent = cluster.send(decode)
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert "digest" in sent.finished.error
    mover.connector.__class__ = SlowLoopback
    again = cluster.send(decode)
    cluster.finish(again)
    again.check_equal()
    cluster.until_idle()


@both_lanes
def test_a_digest_that_was_asked_for_and_did_not_come_fails_the_request(cluster, lane):
    wire, decode = meet(cluster, lane, **ALWAYS)
    sent, asked = granted(cluster, wire, decode)
    assert wire.of(PrefillRequest)[-1].wants_digest
    if lane == "push":
        wire.send(done(asked))
    else:
        wire.send(ready(asked))
        cluster.until(lambda: bool(wire.of(Taken)))
        wire.send(confirmed(asked))
    cluster.finish(sent)
    assert "digest" in sent.finished.error


@both_lanes
def test_by_default_no_digest_is_asked_for(cluster, lane):
    wire, decode = meet(cluster, lane)
    granted(cluster, wire, decode)
    assert not wire.of(PrefillRequest)[-1].wants_digest
