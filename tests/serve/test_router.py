"""A router whose decode workers come and go: each prompt ends once, whole or with an error."""

import threading

import pytest
from support.cluster import DEADLINE_S, Sent

from kvxfer.control.channel import Channel
from kvxfer.control.router_messages import Finished, Token
from kvxfer.errors import WorkerDied
from kvxfer.serve import fleet as fleet_module
from kvxfer.serve.router import Router

BEATING = {"peer_timeout_s": 3.0}
"""A heartbeat every half second."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(fleet_module, "HELLO_RETRY_S", 0.1)


def connect(cluster, *workers, **options):
    options = {"peer_timeout_s": 1.5, "survives_loss": True, "request_timeout_s": 10.0} | options
    router = Router(**options)
    addresses = [worker.address for worker in workers]
    thread = threading.Thread(target=lambda: router.connect(addresses, DEADLINE_S))
    thread.start()
    while thread.is_alive():
        for worker in cluster.workers:
            worker.turn(0.001)
    thread.join()
    cluster.router = router
    return list(router._backends.values())


def two_decodes(cluster, **options):
    prefill, first = cluster.pair("push", **BEATING)
    second = cluster.add("decode", lane="push", worker_id="decode-1", **BEATING)
    second.peers.dial(prefill.address)
    cluster.until(lambda: len(prefill.peers.ready()) == 2)
    return prefill, first, second, connect(cluster, first, second, **options)


def send(cluster, worker, backend, num_tokens=12, max_new_tokens=6):
    tokens = [(5 * i + 3) % 97 for i in range(num_tokens)]
    completion = cluster.router.submit(backend, tokens, max_new_tokens, verify=True)
    return Sent(completion, max_new_tokens, worker.engine.specs)


def test_a_prompt_whose_decode_worker_dies_before_a_token_begins_again_elsewhere(cluster):
    prefill, first, second, backends = two_decodes(cluster)
    prefill.runner.hold()
    sent = send(cluster, second, backends[0])
    cluster.until(lambda: first.role.status()["requests"] == 1)
    cluster.remove(first)
    cluster.until(lambda: second.role.status()["requests"] == 1)
    prefill.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    cluster.until(lambda: second.is_idle())


def test_after_a_token_it_ends_in_an_error_that_says_so(cluster):
    _, first, second, backends = two_decodes(cluster)
    sent = send(cluster, first, backends[0])
    first.runner.hold()
    cluster.until(lambda: len(sent.completion.output) == 1)
    cluster.remove(first)
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert "nothing heard for 1.5 s, after 1 tokens" in sent.finished.error
    assert sent.completion.output == sent.reference.tokens[:1]
    other = send(cluster, second, backends[0])
    cluster.finish(other)
    other.check_equal()


@pytest.mark.parametrize("times", [1, 2])
def test_the_only_decode_worker_restarts_and_is_given_the_prompt_again(cluster, times):
    prefill, decode = cluster.pair("pull", **BEATING)
    (backend,) = connect(cluster, decode)
    address = decode.address
    prefill.runner.hold()
    sent = send(cluster, decode, backend)
    for _ in range(times):
        cluster.until(lambda d=decode: d.role.status()["requests"] == 1)
        cluster.remove(decode)
        decode = cluster.add("decode", lane="pull", listen=address, **BEATING)
        decode.peers.dial(prefill.address)
    cluster.until(lambda d=decode: d.role.status()["requests"] == 1)
    prefill.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    assert sent.completion.attempt == times + 1
    cluster.until_idle()


def test_a_prompt_that_nobody_takes_ends_at_its_deadline(cluster):
    _, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode, request_timeout_s=1.0)
    cluster.remove(decode)
    cluster.until(lambda: backend.facts is None)
    sent = send(cluster, decode, backend)
    cluster.finish(sent)
    assert sent.finished.error == "no whole answer within 1 s"


def test_attempts_at_one_prompt_are_bounded(cluster):
    prefill, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode, peer_timeout_s=30.0)
    prefill.runner.hold()
    sent = send(cluster, decode, backend)
    for attempt in (1, 2, 3):
        cluster.until(lambda n=attempt: sent.completion.attempt == n and not backend.given_up)
        cluster.until(lambda: not sent.completion.is_waiting)
        cluster.router._lose(backend, "the test says so")
    cluster.finish(sent)
    assert "the test says so, again" in sent.finished.error
    prefill.runner.release()
    cluster.until_idle()


def test_what_was_given_up_is_cancelled_when_its_worker_is_back(cluster):
    """It was stopped, not dead: it need not decode for nobody."""
    _, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode, peer_timeout_s=30.0)
    sent = send(cluster, decode, backend, max_new_tokens=150)
    cluster.until(lambda: len(sent.completion.output) > 2)
    cluster.router._lose(backend, "the test says so")
    assert sent.finished.reason == "error"
    cluster.until_idle()
    assert len(decode.runner.batch_sizes) < 140


def test_without_leave_to_survive_a_loss_ends_the_router(cluster):
    _, decode = cluster.pair("push", **BEATING)
    connect(cluster, decode, survives_loss=False)
    cluster.remove(decode)
    with pytest.raises(WorkerDied, match=r"decode-0: nothing heard for 1\.5 s"):
        cluster.turn_for(5.0)


# --- lost, doubled, late --------------------------------------------------------------------------


def meddle(monkeypatch, change):
    """`change(message)` gives the messages that are really sent."""
    original = Channel.send

    def send(self, peer, message):
        for one in change(message):
            original(self, peer, one)

    monkeypatch.setattr(Channel, "send", send)


def test_a_lost_token_is_no_silent_gap(cluster, monkeypatch):
    meddle(monkeypatch, lambda m: [] if isinstance(m, Token) and m.index == 2 else [m])
    _, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode)
    sent = send(cluster, decode, backend)
    cluster.finish(sent)
    assert (sent.finished.reason, sent.finished.error) == ("error", "2 of 6 tokens arrived")
    assert sent.completion.output == sent.reference.tokens[:2]


def test_a_lost_last_token_is_no_silent_end(cluster, monkeypatch):
    meddle(monkeypatch, lambda m: [] if isinstance(m, Token) and m.index == 5 else [m])
    _, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode)
    sent = send(cluster, decode, backend)
    cluster.finish(sent)
    assert sent.finished.error == "5 of 6 tokens arrived"


def test_a_lost_end_is_an_error_at_the_deadline(cluster, monkeypatch):
    meddle(monkeypatch, lambda m: [] if isinstance(m, Finished) else [m])
    _, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode, request_timeout_s=1.0)
    sent = send(cluster, decode, backend)
    cluster.finish(sent)
    assert sent.finished.error == "no whole answer within 1 s"
    assert sent.completion.output == sent.reference.tokens


def test_tokens_that_come_twice_and_in_any_order_are_told_once_in_theirs(cluster, monkeypatch):
    held = []

    def shuffle(message):
        if isinstance(message, Token | Finished):
            held.append(message)
            if not isinstance(message, Finished):
                return []
            return [*reversed(held), *held]
        return [message]

    meddle(monkeypatch, shuffle)
    _, decode = cluster.pair("push", **BEATING)
    (backend,) = connect(cluster, decode)
    sent = send(cluster, decode, backend)
    cluster.finish(sent)
    sent.check_equal()
