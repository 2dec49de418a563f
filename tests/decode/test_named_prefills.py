"""The prefill workers that routers name: dialled, left when nothing is under way, bounded."""

import time

import pytest

from decode import named_prefills
from kvxfer.control.messages import Goodbye
from kvxfer.control.router_messages import Drain, Prefills
from kvxfer.serve.router import Router


@pytest.fixture
def two(cluster):
    """A pair that has met by the decode worker's own options, another prefill worker, a router."""
    first, decode = cluster.pair("push")
    second = cluster.add("prefill", lane="push", worker_id="prefill-1")
    cluster.connect_router(decode)
    return first, second, decode


def name(cluster, *addresses, router=None):
    router = router or cluster.router
    (backend,) = router.backends
    router._channel.send(backend.key, Prefills(list(addresses)))


def ready(decode):
    return sorted(peer.name for peer in decode.peers.ready())


def known(decode):
    return {peer.key.removeprefix("out:") for peer in decode.peers.dialled()}


def test_who_is_named_is_dialled_and_who_is_not_is_left(cluster, two):
    first, second, decode = two
    name(cluster, first.address, second.address)
    cluster.until(lambda: ready(decode) == ["prefill-0", "prefill-1"])
    name(cluster, second.address)
    cluster.until(lambda: known(decode) == {second.address})
    cluster.until(lambda: [p.name for p in first.peers.ready()] == [])
    sent = cluster.send(decode)
    cluster.finish(sent)
    sent.check_equal()
    assert decode.peers.holders.names() == first.peers.holders.names() == []
    name(cluster, first.address)
    cluster.until(lambda: ready(decode) == ["prefill-0"])
    sent = cluster.send(decode)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


def test_who_is_named_no_longer_finishes_what_it_has_and_gets_nothing_new(cluster, two):
    first, second, decode = two
    first.runner.hold()
    sent = cluster.send(decode)
    cluster.until(lambda: bool(first.role._jobs))
    name(cluster, second.address)
    cluster.until(lambda: ready(decode) == ["prefill-0", "prefill-1"])
    more = [cluster.send(decode) for _ in range(3)]
    cluster.finish(*more)
    assert len(first.role._jobs) == 1
    first.runner.release()
    cluster.finish(sent)
    for one in (sent, *more):
        one.check_equal()
    cluster.until(lambda: ready(decode) == ["prefill-1"])
    cluster.until_idle()


def test_several_routers_name_more_and_the_last_list_outlives_its_router(cluster, two):
    first, second, decode = two
    other = Router(60.0)
    other._fleet.dial(decode.address)
    try:
        while not all(one.facts for one in other.backends):
            cluster.turn()
            other.poll(0.0)
        name(cluster, first.address)
        name(cluster, second.address, router=other)
        cluster.until(lambda: ready(decode) == ["prefill-0", "prefill-1"])
        (backend,) = other.backends
        other._channel.send(backend.key, Goodbye("enough", False))
        cluster.until(lambda: ready(decode) == ["prefill-0"])
    finally:
        other.close()
    cluster.router._channel.send(cluster.router.backends[0].key, Goodbye("enough", False))
    cluster.until(lambda: not any(p.facts is None for p in decode.peers.all() if p.is_met))
    cluster.turn_for(0.05)
    assert known(decode) == {first.address}


@pytest.mark.parametrize(
    "addresses",
    [["nowhere"], ["tcp://10.1.2.3:5"], ["tcp://127.0.0.1:5#key"], ["tcp://127.0.0.1:5", ""],
     [f"tcp://127.0.0.1:{port}" for port in range(1, named_prefills.MAX_PREFILLS + 2)]],
    ids=["no address", "not loopback", "a key where there are none", "one of two", "too many"],
)  # fmt: skip
def test_a_list_that_cannot_be_costs_the_router_its_session_and_changes_nothing(
    cluster, two, addresses
):
    first, _, decode = two
    before = decode.loop._num_wrong
    name(cluster, *addresses)
    cluster.until(lambda: decode.loop._num_wrong == before + 1)
    assert known(decode) == {first.address}
    assert ready(decode) == ["prefill-0"]


def test_a_worker_is_no_router(cluster, two):
    first, second, decode = two
    (peer,) = first.peers.ready()
    first.channel.send(peer.key, Prefills([second.address]))
    before = decode.loop._num_wrong
    cluster.until(lambda: decode.loop._num_wrong == before + 1)
    assert known(decode) == {first.address}


def test_a_prefill_worker_that_does_not_fit_does_not_end_who_was_told_of_it(cluster):
    odd = cluster.add("prefill", engine={"fingerprint": "0" * 32})
    fits = cluster.add("prefill", worker_id="prefill-1")
    decode = cluster.add("decode")
    cluster.connect_router(decode)
    name(cluster, odd.address)
    cluster.until(lambda: any(peer.refusal for peer in decode.peers.dialled()))
    name(cluster, fits.address)
    cluster.until(lambda: ready(decode) == ["prefill-1"])


def test_the_named_prefill_worker_is_asked_first_and_others_after_a_failure(cluster, two):
    first, second, decode = two
    name(cluster, first.address, second.address)
    cluster.until(lambda: ready(decode) == ["prefill-0", "prefill-1"])
    router, (backend,) = cluster.router, cluster.router.backends
    for named, worker, other in (("prefill-1", second, first), ("prefill-0", first, second)):
        chunks = other.runner.num_chunks
        for seed in range(4):
            sent = _submit(cluster, decode, router, backend, named, seed)
            cluster.finish(sent)
            sent.check_equal()
        assert other.runner.num_chunks == chunks
        worker.runner.fail_next = "no such luck"
        sent = _submit(cluster, decode, router, backend, named, 7)
        cluster.finish(sent)
        sent.check_equal()
        assert other.runner.num_chunks > chunks
    sent = _submit(cluster, decode, router, backend, "prefill-9", 9)
    cluster.finish(sent)
    sent.check_equal()


def _submit(cluster, decode, router, backend, named, seed):
    import msgspec
    from support.cluster import Sent

    send = router._channel.send

    def naming(key, message):
        if type(message).__name__ == "Generate":
            message = msgspec.structs.replace(message, prefill=named)
        send(key, message)

    router._channel.send = naming
    tokens = [(11 * seed + 3 * i) % 97 for i in range(10)]
    completion = router.submit(backend, tokens, 3, verify=True)
    router._channel.send = send
    return Sent(completion, 3, decode.engine.specs)


def test_one_that_drains_by_its_own_word_is_asked_for_nothing_new(cluster, two):
    first, second, decode = two
    name(cluster, first.address, second.address)
    cluster.until(lambda: ready(decode) == ["prefill-0", "prefill-1"])
    (peer,) = first.peers.ready()
    first.channel.send(peer.key, Drain("soon"))
    cluster.until(lambda: any(p.is_draining for p in decode.peers.ready()))
    for _ in range(4):
        sent = cluster.send(decode)
        cluster.finish(sent)
        sent.check_equal()
    assert first.runner.num_chunks == 0


def test_what_a_draining_prefill_worker_gives_back_waits_for_another(cluster, two):
    """It was asked before its word was heard, and nobody else is there yet."""
    first, second, decode = two
    first.parts.draining.begin("soon")
    sent = cluster.send(decode)
    time.sleep(0.05)
    cluster.until(lambda: any(one.prefill for one in decode.role._requests.values()))
    (peer,) = decode.peers.ready()
    assert peer.is_draining
    cluster.until(lambda: not any(one.prefill for one in decode.role._requests.values()))
    cluster.turn_for(0.05)
    assert sent.finished is None
    assert first.role.status()["jobs"] == 0
    name(cluster, second.address)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()
