"""Workers that join and leave while prompts come: each is served once, and right."""

import pytest
from support.fleet import Fleet

from kvxfer.control.router_messages import Drain, Prefills
from kvxfer.errors import UsageError
from kvxfer.serve import fleet as fleet_module
from kvxfer.serve import pairing
from kvxfer.serve.backend import BackendState


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(fleet_module, "HELLO_RETRY_S", 0.1)
    monkeypatch.setattr(fleet_module, "STATUS_S", 0.02)


@pytest.fixture
def fleet(cluster):
    return Fleet(cluster)


def states(fleet):
    return {one.name: one.state for one in fleet.router.backends}


def test_no_prompt_is_lost_while_workers_join_and_leave(fleet):
    """2 + 2, one of each drains and one of each joins, in the midst of prompts."""
    fleet.join("prefill-0", "prefill-1", "decode-0", "decode-1")
    sent, leaving = [], []
    for turn in range(60):
        sent.append(fleet.send())
        if turn == 20:
            fleet.until(lambda: fleet.router.is_ready)
            leaving = [fleet.router.drain(name) for name in ("prefill-0", "decode-0")]
            fleet.join("prefill-2", "decode-2")
        fleet.turn()
    fleet.finish(*sent)
    for one in sent:
        one.check_equal()
    fleet.until(lambda: all(one.is_drained for one in leaving))
    assert sorted(fleet.workers) == ["decode-1", "decode-2", "prefill-1", "prefill-2"]
    fleet.until_met()
    more = [fleet.send() for _ in range(20)]
    fleet.finish(*more)
    for one in more:
        one.check_equal()
    for worker in fleet.workers.values():
        assert worker.runner.num_chunks or worker.runner.batch_sizes, worker.options.worker_id
        assert len(worker.peers.dialled()) in (0, 2), "the one that left is forgotten"
    fleet.cluster.until_idle()


def test_prompts_that_come_before_any_worker_wait_and_no_more_than_told(cluster):
    fleet = Fleet(cluster, max_num_waiting=3)
    waiting = [fleet.send() for _ in range(3)]
    surplus = fleet.send()
    assert surplus.finished.reason == "overloaded"
    assert surplus.finished.retry_after_s > 0
    assert surplus.finished.error == "3 prompts wait for a worker"
    assert fleet.router.num_waiting == 3
    fleet.join("prefill-0", "decode-0")
    fleet.finish(*waiting)
    for one in waiting:
        one.check_equal()


def test_a_worker_that_drains_finishes_and_gets_nothing_new(fleet):
    backends = fleet.join("prefill-0", "decode-0", "decode-1")
    fleet.until_met()
    fleet.workers["prefill-0"].runner.hold()
    sent = [fleet.send() for _ in range(6)]
    fleet.until(lambda: {one.completion.backend for one in sent} == set(backends[1:]))
    drained = fleet.router.drain("decode-0")
    later = [fleet.send() for _ in range(6)]
    assert {one.completion.backend.name for one in later} == {"decode-1"}
    assert states(fleet)["decode-0"] is BackendState.DRAINING
    fleet.cluster.turn_for(0.1)
    assert not drained.is_drained, "it has prompts"
    fleet.workers["prefill-0"].runner.release()
    fleet.finish(*sent, *later)
    for one in (*sent, *later):
        one.check_equal()
        assert one.completion.attempt == 1
    fleet.until(lambda: drained.is_drained)
    assert "decode-0" not in states(fleet)
    assert [peer.name for peer in fleet.workers["prefill-0"].peers.ready()] == ["decode-1"]
    assert fleet.workers["prefill-0"].peers.holders.names() == [], "nothing is kept for it"


def test_a_prefill_worker_that_drains_finishes_and_gets_nothing_new(fleet):
    fleet.join("prefill-0", "prefill-1", "decode-0")
    fleet.until_met()
    for name in ("prefill-0", "prefill-1"):
        fleet.workers[name].runner.hold()
    sent = [fleet.send() for _ in range(6)]
    fleet.until(lambda: all(fleet.workers[f"prefill-{i}"].role._jobs for i in (0, 1)))
    drained = fleet.router.drain("prefill-0")
    before = len(fleet.workers["prefill-0"].role._jobs)
    later = [fleet.send() for _ in range(6)]
    fleet.until(lambda: len(fleet.workers["prefill-1"].role._jobs) >= 6)
    assert len(fleet.workers["prefill-0"].role._jobs) == before
    for name in ("prefill-0", "prefill-1"):
        fleet.workers[name].runner.release()
    fleet.finish(*sent, *later)
    for one in (*sent, *later):
        one.check_equal()
    fleet.until(lambda: drained.is_drained)
    fleet.until(lambda: len(fleet.workers["decode-0"].peers.dialled()) == 1)
    fleet.cluster.until_idle()


def test_a_worker_that_drains_by_itself_is_greeted_again_when_it_is_back(fleet):
    """As after SIGTERM: nobody told the router, and it is to come back at its address."""
    (_, decode, _) = fleet.join("prefill-0", "decode-0", "decode-1")
    fleet.until_met()
    fleet.workers["decode-0"].parts.draining.begin("a test")
    sent = [fleet.send() for _ in range(8)]
    fleet.until(lambda: decode.state is BackendState.GREETING)
    fleet.finish(*sent)
    for one in sent:
        one.check_equal()
    fleet.start("decode-0", listen=decode.address)
    fleet.until(lambda: decode.state is BackendState.READY)


def test_what_one_decode_worker_has_no_room_for_goes_to_another(fleet):
    fleet.join("prefill-0")
    fleet.join("decode-0", "decode-1", max_num_queued_seqs=1)
    fleet.until_met()
    fleet.workers["prefill-0"].runner.hold()
    sent = [fleet.send() for _ in range(20)]
    fleet.until(lambda: sum(one.finished is not None for one in sent) >= 10)
    fleet.workers["prefill-0"].runner.release()
    fleet.finish(*sent)
    full = [one for one in sent if one.finished.reason == "overloaded"]
    assert len(full) >= 10
    for one in full:
        assert len(one.completion.refusals) == 2, "both were asked"
        assert 0 < one.finished.retry_after_s <= 60
    for one in sent:
        if one not in full:
            one.check_equal()
    fleet.cluster.until_idle()


def test_a_removed_worker_is_forgotten_and_its_prompts_begin_again(fleet):
    fleet.join("prefill-0", "decode-0", "decode-1")
    fleet.until_met()
    fleet.workers["prefill-0"].runner.hold()
    sent = [fleet.send() for _ in range(6)]
    gone = fleet.router.remove("decode-0")
    assert gone.state is BackendState.GONE
    fleet.workers["prefill-0"].runner.release()
    fleet.finish(*sent)
    for one in sent:
        one.check_equal()
    assert {one.completion.backend.name for one in sent} == {"decode-1"}
    fleet.cluster.until_idle()


def test_who_is_not_known_cannot_leave(fleet):
    fleet.join("decode-0")
    fleet.until(lambda: states(fleet) == {"decode-0": BackendState.READY})
    for leave in (fleet.router.drain, fleet.router.remove):
        with pytest.raises(UsageError, match="worker: 'nobody': no such worker; there are: dec"):
            leave("nobody")


@pytest.mark.parametrize("address", ["nowhere", "tcp://10.0.0.1:5", "tcp://127.0.0.1:1#name"])
def test_an_address_that_is_none_is_refused_and_changes_nothing(fleet, address):
    with pytest.raises(UsageError):
        fleet.router.add(address)
    assert fleet.router.backends == []
    assert not fleet.router._fleet.announces


def test_a_worker_that_never_came_may_be_drained(fleet):
    backend = fleet.router.add("tcp://127.0.0.1:9", role="prefill")
    assert fleet.router.drain("tcp://127.0.0.1:9") is backend
    assert backend.state is BackendState.GONE
    assert fleet.router.backends == []


def test_a_lost_drain_is_said_again(fleet, losing):
    fleet.join("prefill-0", "decode-0")
    fleet.until_met()
    left = losing(Drain)
    drained = fleet.router.drain("decode-0")
    fleet.until(lambda: drained.is_drained)
    assert not any(left.values())


def test_a_lost_list_of_prefill_workers_is_said_again(fleet, losing):
    left = losing(Prefills)
    fleet.join("prefill-0", "decode-0")
    fleet.until_met()
    assert not any(left.values())


def test_prompts_that_begin_alike_go_where_the_beginning_was_computed(fleet, monkeypatch):
    """Where there is no model what is saved is microseconds."""
    monkeypatch.setattr(pairing, "NEAR_S", 1e-5)
    fleet.join("prefill-0", "prefill-1", "decode-0")
    fleet.until_met()
    beginning = [5 * i % 97 for i in range(40)]
    first = fleet.send(tokens=[*beginning, 1])
    fleet.finish(first)
    where = first.completion.prefill
    fleet.until(lambda: where.status.get("prefix_cache_blocks"))
    for tail in range(2, 12):
        one = fleet.send(tokens=[*beginning, tail])
        fleet.finish(one)
        one.check_equal()
        assert one.completion.prefill is where
    assert where.status["prefix_cache_hit_tokens"] > 0


def test_load_spreads_over_all_pairs(fleet):
    fleet.join("prefill-0", "prefill-1", "decode-0", "decode-1")
    fleet.until_met()
    sent = [fleet.send() for _ in range(40)]
    pairs = [(one.completion.prefill.name, one.completion.backend.name) for one in sent]
    fleet.finish(*sent)
    for side, names in zip(zip(*pairs, strict=True), ("prefill", "decode"), strict=True):
        for index in (0, 1):
            assert 10 <= side.count(f"{names}-{index}") <= 30
    assert len(set(pairs)) == 4
