"""After how many layers KV is handed over."""

import dataclasses

import pytest
from support.workers import SPEC

from kvxfer.cache.spec import GroupKind
from prefill.streaming import layers_at_once

TOKEN_BYTES = SPEC.block_bytes // SPEC.block_size
MANY = dataclasses.replace(SPEC, num_layers=12)


@pytest.mark.parametrize(
    "num_tokens, least_bytes, every",
    [
        (8, 1, 1),
        (8, 1 << 30, 12),
        (8, 6 * TOKEN_BYTES * 8, 12),
        (8, 3 * TOKEN_BYTES * 8, 6),
        (8, 2 * TOKEN_BYTES * 8, 4),
        (0, 1, 12),
    ],
)
def test_in_pieces_of_at_least_so_many_bytes(num_tokens, least_bytes, every):
    assert layers_at_once([MANY], num_tokens, least_bytes) == every


def test_an_encoders_kv_travels_whole():
    cross = dataclasses.replace(MANY, kind=GroupKind.CROSS)
    assert layers_at_once([MANY, cross], 8, 1) == 24
