"""The decode batch and what a request computes next."""

import pytest
from support.workers import SPEC

from decode.batch import DecodeBatch
from decode.schedule import DecodeRequest, RequestState
from kvxfer.cache.table import BlockTable
from kvxfer.control.router_messages import Generate, Sampling


def make_request(name="r", prompt=(1, 2, 3), max_new_tokens=3, stop=()):
    generate = Generate(name, list(prompt), max_new_tokens, Sampling(), list(stop), "", False)
    return DecodeRequest(generate, "router", deadline_s=0.0, specs=[SPEC], blocks=[[4, 5]])


@pytest.mark.parametrize(
    "output, stop, cancelled, reason",
    [
        ([], (), False, ""),
        ([7], (), False, ""),
        ([7, 8], (), False, ""),
        ([7, 8, 9], (), False, "length"),
        ([7, 8, 9], (9,), False, "stop"),
        ([7], (7,), False, "stop"),
        ([7, 8], (7,), False, ""),
        ([], (), True, "cancelled"),
        ([7], (7,), True, "cancelled"),
    ],
)
def test_why_a_request_ends(output, stop, cancelled, reason):
    request = make_request(stop=stop)
    request.output, request.is_cancelled = list(output), cancelled
    assert request.finish_reason() == reason


def test_the_next_step_computes_the_newest_token_at_its_position():
    request = make_request(prompt=[1, 2, 3])
    request.output = [50]
    step = request.next_step()
    assert (list(step.tokens), step.start, step.tables) == ([50], 3, [BlockTable([4, 5])])
    request.output = [50, 60]
    step = request.next_step()
    assert (list(step.tokens), step.start) == ([60], 4)
    assert step.sample is not None


def test_requests_join_in_order_as_there_is_room():
    batch = DecodeBatch(max_num_seqs=2)
    first, second, third = (make_request(name) for name in "abc")
    for request in (first, second, third):
        request.state = RequestState.FILLED
        batch.join(request)
    assert batch.next_batch() == [first, second]
    assert (first.state, third.state) == (RequestState.RUNNING, RequestState.FILLED)
    batch.leave(first)
    assert batch.next_batch() == [second, third]
    assert third.state is RequestState.RUNNING
    for request in (second, third, first):
        batch.leave(request)
    assert batch.next_batch() == []


def test_one_step_at_a_time():
    batch = DecodeBatch(max_num_seqs=2)
    batch.join(make_request())
    batch.begin(batch.next_batch())
    assert batch.next_batch() == []
    batch.end()
    assert len(batch.next_batch()) == 1


def test_a_request_may_leave_before_it_has_run():
    batch = DecodeBatch(max_num_seqs=1)
    first, second = make_request("a"), make_request("b")
    batch.join(first)
    batch.join(second)
    assert batch.next_batch() == [first]
    batch.leave(second)
    batch.leave(first)
    assert batch.next_batch() == []


def test_a_batch_is_a_copy():
    batch = DecodeBatch(max_num_seqs=3)
    first = make_request("a")
    batch.join(first)
    running = batch.next_batch()
    batch.leave(first)
    assert running == [first]
