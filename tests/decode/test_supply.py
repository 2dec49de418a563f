"""How many blocks a sequence starts with, grows by, and leaves to others."""

from types import SimpleNamespace

import pytest
from support.workers import SPEC

from decode.schedule import DecodeRequest
from decode.supply import blocks_to_start, can_resume, reserve
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.control.router_messages import Generate, Sampling

SLIDING = KVCacheSpec(3, 1, 8, 24, "float32", 4, GroupKind.SLIDING, 10)
CROSS = KVCacheSpec(2, 2, 16, 16, "float32", 4, GroupKind.CROSS)


def make_request(num_prompt=6, max_new_tokens=30, specs=(SPEC,), **more):
    generate = Generate("r", [1] * num_prompt, max_new_tokens, Sampling(), [], "", False)
    return DecodeRequest(generate, "router", 0.0, specs=specs, **more)


def prefill(max_model_len):
    return SimpleNamespace(facts=SimpleNamespace(max_model_len=max_model_len))


@pytest.mark.parametrize(
    "specs, limits, able",
    [
        ([SPEC], [36], True),
        ([SPEC], [35], False),
        ([SPEC], [100, 35], False),
        ([SPEC, SLIDING], [100, 36], True),
        ([SPEC, CROSS], [100], False),
    ],
)
def test_who_may_be_preempted(specs, limits, able):
    request = make_request(specs=specs)
    assert can_resume(request, [prefill(limit) for limit in limits]) is able


@pytest.mark.parametrize(
    "num_resumed, max_new_tokens, able, blocks",
    [
        (0, 30, True, 3),  # 6 tokens and a block more
        (0, 2, True, 2),
        (0, 30, False, 9),
        (7, 30, True, 5),  # 13 tokens, and a block more
        (29, 30, True, 9),
    ],
)
def test_what_a_request_starts_with(num_resumed, max_new_tokens, able, blocks):
    request = make_request(max_new_tokens=max_new_tokens)
    request.num_resumed, request.can_resume = num_resumed, able
    assert blocks_to_start(request) == [blocks]


def test_the_head_start_is_of_the_largest_blocks():
    large = KVCacheSpec(2, 2, 16, 16, "float32", 16)
    request = make_request(specs=[SPEC, large], can_resume=True)
    assert blocks_to_start(request) == [6, 2]  # 22 tokens


def test_what_is_kept_for_those_who_grow():
    both = (SPEC, SLIDING)
    young = make_request(specs=both, can_resume=True, blocks=[[1, 2, 3], [1, 2, 3]])
    windowed = make_request(specs=both, can_resume=True, blocks=[[1, 2, 3, 4], [1, 2, 3, 4]])
    grown = make_request(specs=both, can_resume=True, blocks=[[*range(9)], [1, 2, 3, 4]])
    fixed = make_request(specs=both, blocks=[[*range(9)], [1, 2, 3, 4]])
    assert reserve([], 2) == [0, 0]
    assert reserve([young, windowed, grown, fixed], 2) == [2, 1]
