"""The scheduler's half, by requests that have what vLLM's have and it looks at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connectors.vllm.handover import RankAddress, Source
from connectors.vllm.scheduler import Scheduler

DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
RANKS = {0: RankAddress("tcp://127.0.0.1:5000", "life")}


def request(params: dict | None, num_tokens: int = 40, status: str = "FINISHED_LENGTH_CAPPED"):
    tokens = list(range(num_tokens))
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_tokens,
        prompt_token_ids=tokens,
        _all_token_ids=list(tokens),
        status=SimpleNamespace(name=status),
    )


def allocated(*ids: int):
    """0: the null block."""
    blocks = [SimpleNamespace(block_id=block, is_null=block == 0) for block in ids]
    return SimpleNamespace(blocks=(blocks,))


@pytest.fixture
def scheduler():
    made = Scheduler("E", [0], is_producer=True, is_consumer=True)
    made.set_ranks(RANKS)
    return made


def answered(num_tokens: int = 40) -> dict:
    return Source("P", "p", "lease", tuple(RANKS.values())).params(num_tokens)


def test_a_finished_prompt_is_offered_and_its_blocks_stay(scheduler):
    stays, params = scheduler.request_finished(request(DECODE), ([5, 6, 7],))
    assert stays and params is not None and params["remote_num_tokens"] == 40
    (offer,) = scheduler.take_step().offers
    assert (offer.request_id, offer.blocks, offer.num_tokens) == ("r", ([5, 6, 7],), 40)
    assert Source.parse(params).lease_id == offer.lease_id
    assert scheduler.take_step().is_empty


@pytest.mark.parametrize(
    ("params", "status", "blocks"),
    [
        (None, "FINISHED_STOPPED", [5]),
        ({"do_remote_decode": False}, "FINISHED_STOPPED", [5]),
        (DECODE, "FINISHED_ABORTED", [5]),
        (DECODE, "FINISHED_STOPPED", []),
    ],
)
def test_other_requests_leave_nothing_behind(scheduler, params, status: str, blocks: list[int]):
    assert scheduler.request_finished(request(params, status=status), (blocks,)) == (False, None)
    assert scheduler.take_step().is_empty


def test_a_request_with_kv_elsewhere_is_claimed_then_loaded(scheduler):
    mine = request(answered())
    scheduler.on_new_request(mine)
    assert scheduler.take_step().claims[0].request_id == "r"
    assert scheduler.num_new_matched_tokens(mine, 0) == (40, True)
    assert scheduler.num_new_matched_tokens(mine, 32) == (8, True)  # asked again, and a hit
    scheduler.after_alloc(mine, allocated(1, 2, 3), 8)
    (load,) = scheduler.take_step().loads
    assert (load.start, load.end, load.blocks) == (32, 40, ([1, 2, 3],))
    assert scheduler.num_new_matched_tokens(mine, 0) == (0, False)  # preempted: computed here
    scheduler.after_alloc(mine, allocated(1, 2, 3), 0)
    assert scheduler.take_step().is_empty


def test_a_hit_of_everything_lets_the_producers_go(scheduler):
    mine = request(answered(32))
    scheduler.on_new_request(mine)
    scheduler.take_step()
    assert scheduler.num_new_matched_tokens(mine, 32) == (0, False)
    scheduler.after_alloc(mine, allocated(1, 2, 3), 0)
    assert scheduler.take_step().drops == ["r"]


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_aborted_request_is_dropped(scheduler, is_loading: bool):
    mine = request(answered(), status="FINISHED_ABORTED")
    scheduler.on_new_request(mine)
    if is_loading:
        scheduler.after_alloc(mine, allocated(1, 2, 3), 40)
    scheduler.take_step()
    assert scheduler.request_finished(mine, ([1, 2, 3],)) == (False, None)
    assert scheduler.take_step().drops == ["r"]


def test_a_load_that_has_ended_is_not_dropped(scheduler):
    mine = request(answered())
    scheduler.on_new_request(mine)
    scheduler.after_alloc(mine, allocated(1, 2, 3), 40)
    scheduler.loads_ended({"r"})
    scheduler.take_step()
    scheduler.request_finished(mine, ([1, 2, 3],))
    assert scheduler.take_step().is_empty


@pytest.mark.parametrize(
    "change", [{"remote_ranks": None}, {"remote_num_tokens": "40"}, {"remote_lease_id": ""}]
)
def test_parameters_that_are_not_ours_are_prefilled_here(scheduler, change: dict, caplog):
    mine = request({**answered(), **change})
    scheduler.on_new_request(mine)
    assert scheduler.num_new_matched_tokens(mine, 0) == (0, False)
    assert scheduler.take_step().is_empty and "is prefilled here" in caplog.text


def test_each_does_its_own_part_only(caplog):
    one = Scheduler("E", [0], is_producer=False, is_consumer=False)
    one.on_new_request(request(answered()))
    assert one.request_finished(request(DECODE), ([5],)) == (False, None)
    assert one.take_step().is_empty
    assert "no consumer" in caplog.text and "no producer" in caplog.text


def test_a_sliding_windows_last_block_is_still_there_for_the_consumer():
    for num_tokens in range(1, 70):
        _check_window(num_tokens, window=20, size=16)


def _check_window(num_tokens: int, window: int, size: int) -> None:
    producer = Scheduler("E", [0], [(window, size)], is_producer=True, is_consumer=False)
    mine = request(DECODE, num_tokens)
    producer.on_new_request(mine)
    kept_from = max(0, mine.num_prompt_tokens + 1 - window) // size * size  # by vLLM
    computed_by_the_consumer = mine.num_prompt_tokens
    if computed_by_the_consumer == num_tokens:
        computed_by_the_consumer -= 1  # the last token, for its logits
    assert kept_from <= max(0, computed_by_the_consumer + 1 - window)
    assert len(mine._all_token_ids) == len(mine.prompt_token_ids) == mine.num_prompt_tokens
