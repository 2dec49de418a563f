"""Lanes tried out between workers of several ranks: every pair of ranks that KV moves between."""

import dataclasses
import logging

import pytest
from support.faulty import SlowLoopback
from support.ranks_here import ranked_engine
from support.workers import SPEC

from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import HandshakeRejected
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import TransferPlan

PUSH, PULL = (Lane("loopback", direction) for direction in Direction)
WINDOWED = dataclasses.replace(SPEC, kind=GroupKind.SLIDING, window=5)
LATENT = KVCacheSpec(2, 1, 24, 0, "float32", 4, GroupKind.MLA)
CASES = [(SPEC, 1, 2), (SPEC, 2, 1), (SPEC, 2, 2), (SPEC, 4, 1), (SPEC, 1, 4), (SPEC, 2, 4),
         (WINDOWED, 2, 1), (LATENT, 2, 1)]  # fmt: skip


def idle_pair(cluster, sizes, spec=SPEC, layouts=("LBHNC", "BHLNC"), **changes):
    options = {"lane": "auto", "lane_test": True, **changes}
    return [
        cluster.add(role, engine=ranked_engine(size, role, spec, layout=layout), **options)
        for role, size, layout in zip(("prefill", "decode"), sizes, layouts, strict=True)
    ]


def meet(cluster, prefill, decode):
    decode.peers.dial(prefill.address)
    cluster.until(lambda: all(worker.peers.ready() for worker in (prefill, decode)))
    lanes = [worker.peers.ready()[0].lane for worker in (prefill, decode)]
    assert lanes[0] == lanes[1]
    return lanes[0]


def transports(worker, rank):
    return worker.engine.group.hosts[rank].connector.connectors


@pytest.mark.parametrize(("spec", "prefill", "decode"), CASES)
def test_all_ranks_move_their_part_and_the_rate_is_told(cluster, caplog, spec, prefill, decode):
    caplog.set_level(logging.INFO)
    pair = idle_pair(cluster, (prefill, decode), spec)
    lane = meet(cluster, *pair)
    assert pair[1].peers.ready()[0].lane_gbps == pair[0].peers.ready()[0].lane_gbps > 0
    assert f"lane to prefill-0: {lane} at" in caplog.text
    assert f"from {prefill} to {decode} ranks" in caplog.text
    assert "also tried" in caplog.text
    assert "does not work" not in caplog.text
    for rank in range(decode):
        assert transports(pair[1], rank)["loopback"].num_submitted > 0, "every rank pulls"
    cluster.until_idle()


class Idler(SlowLoopback):
    """Says that it has moved what it has not."""

    def submit(self, peer, direction, plan):
        return super().submit(peer, direction, TransferPlan(()))


@pytest.mark.parametrize(("role", "lane"), [(0, PULL), (1, PUSH)])
def test_a_lane_that_one_rank_gets_wrong_is_not_used(cluster, caplog, role, lane):
    pair = idle_pair(cluster, (2, 2))
    transports(pair[role], 1)["loopback"].__class__ = Idler
    assert meet(cluster, *pair) == lane
    wrong = PUSH if lane is PULL else PULL
    assert f"lane {wrong} to prefill-0 does not work: it delivered wrong bytes" in caplog.text
    cluster.until_idle()


def test_a_rank_that_refuses_a_lane_rules_it_out(cluster, caplog):
    pair = idle_pair(cluster, (1, 2))
    transports(pair[1], 1)["loopback"].refuse.add("submit")
    assert meet(cluster, *pair) == PUSH
    assert "loopback/pull to prefill-0 does not work: submit is refused" in caplog.text
    cluster.until_idle()


@pytest.mark.slow
def test_a_lane_slower_than_asked_for_is_refused(cluster):
    pair = idle_pair(cluster, (2, 1), min_lane_gbps=1e6)
    with pytest.raises(HandshakeRejected, match="min_lane_gbps"):
        meet(cluster, *pair)
    cluster.remove(pair[1])
    cluster.until(pair[0].is_idle)


def test_all_ranks_begin_new_agents_when_a_lost_peer_comes_back(cluster):
    prefill, decode = idle_pair(cluster, (2, 2))
    lane = meet(cluster, prefill, decode)
    before = [transports(decode, rank)["loopback"]._epoch.name for rank in range(2)]
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: decode.parts.residency.epoch == 1)
    cluster.until(lambda: decode.parts.residency.retired.num_epochs == 0)
    after = [transports(decode, rank)["loopback"] for rank in range(2)]
    assert not set(before) & {one._epoch.name for one in after}
    cluster.until(lambda: not any(one._past or one._ending for one in after))
    decode.peers.lose(decode.peers.ready()[0].key, "the lanes are tried again, by the new agents")
    cluster.until(lambda: decode.parts.residency.epoch == 2)
    assert decode.peers.ready()[0].lane.connector == lane.connector
    cluster.until_idle()
