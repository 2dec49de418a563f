"""Options, parameters of requests, block tables and tensors: what is taken, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
import torch
from support.vllm_ranks import DIM, NAMES, tensors

from connectors.vllm.handover import RankAddress, Source
from connectors.vllm.layout import LayerGroup, describe, page_format
from connectors.vllm.messages import CODEC, Claim, Ready
from connectors.vllm.options import Options
from connectors.vllm.ranks import shares_of
from connectors.vllm.reading import reading_of
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.errors import PlanError, UsageError, WireError
from kvxfer.transfer.connector import find_connector

GROUP = LayerGroup(NAMES, 4, DIM, DIM, 16)


def test_the_package_is_no_connector_of_our_own_workers():
    with pytest.raises(UsageError, match="no connector"):
        find_connector("vllm")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"lanes": "x"}, "lanes.*is no option"),
        ({"kv_lease_duration": 20}, "is called lease_timeout_s here"),
        ({"lease_timeout_s": 0}, "lease_timeout_s: 0: must be more"),
        ({"lease_timeout_s": True}, "must be a number"),
        ({"listen": 5}, "listen: 5: must be a string"),
        ({"connectors": "nothing"}, "no such module"),
        ({"kv_cache_layout": "HND"}, "kv_cache_layout.*must be one of"),
    ],
)
def test_options_that_cannot_be_are_refused(extra: dict, text: str):
    with pytest.raises(UsageError, match=text):
        Options.resolve(extra, {})


def test_keys_come_from_the_options_or_the_environment():
    environ = {"KVXFER_KEY_FILE": "/no/such/a.key", "KVXFER_PEER_KEYS": "/no/such/keys"}
    assert Options.resolve({}, environ).key_file == "/no/such/a.key"
    assert Options.resolve({"key_file": "/b.key"}, environ).key_file == "/b.key"
    with pytest.raises(UsageError, match="peer_keys"):
        Options.resolve({}, {"KVXFER_KEY_FILE": "/no/such/a.key"}).keys()


def test_a_rank_listens_beyond_loopback_with_keys_only():
    plain = Options.resolve({"listen": "tcp://10.0.0.1:5000"}, {})
    with pytest.raises(UsageError, match="without keys"):
        plain.address(0)
    with_keys = Options.resolve({"listen": "tcp://10.0.0.1:5000", "key_file": "/a.key"}, {})
    assert with_keys.address(3) == "tcp://10.0.0.1:5003"
    assert Options.resolve({}, {}).address(3) == "tcp://127.0.0.1:0"
    with pytest.raises(UsageError, match="no port for rank 9"):
        Options.resolve({"listen": "tcp://127.0.0.1:65530"}, {}).address(9)


def test_what_a_producer_answers_is_read_back():
    source = Source("E", "r-1", "lease", (RankAddress("tcp://10.0.0.1:5000#p", "life"),))
    params = source.params(70)
    assert params["remote_host"] == "10.0.0.1" and params["remote_port"] == 5000
    assert msgspec.json.decode(msgspec.json.encode(params)) == params  # it travels by HTTP
    assert Source.parse(params) == source


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_lease_id", None),
        ("remote_lease_id", "x" * 1000),
        ("remote_engine_id", "a\nb"),
        ("remote_ranks", "tcp"),
        ("remote_ranks", []),
        ("remote_ranks", [["one"]]),
        ("remote_ranks", [5]),
    ],
)
def test_other_parameters_are_refused(name: str, value: object):
    params = Source("E", "r", "lease", (RankAddress("tcp://127.0.0.1:5", "life"),)).params(5)
    with pytest.raises(UsageError, match=name):
        Source.parse({**params, name: value})


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x81\xa4type\xa5Claim", b"\xff" * 9])
def test_bytes_that_are_no_message_are_refused(data: bytes):
    with pytest.raises(WireError):
        CODEC.decode(data)


def test_messages_survive_the_wire():
    for message in (Claim("l", 2), Ready("l", 5, [[1, 0], [3]])):
        assert CODEC.decode(CODEC.encode(message)) == [message]


def test_every_head_is_read_once_and_every_rank_is_claimed():
    for producers, consumers, heads in ((1, 1, 4), (2, 4, 4), (4, 2, 4), (8, 1, 2), (1, 8, 2)):
        claims: dict[int, list[int]] = {}
        for rank in range(consumers):
            shares = shares_of(rank, consumers, producers, heads)
            for share in shares:
                claims.setdefault(share.rank, []).append(share.num_readers)
            read = sorted(head for share in shares for head in share.heads)
            assert read == sorted(set(read)) and len(read) == max(1, heads // consumers)
        assert sorted(claims) == list(range(producers))
        assert all(set(counts) == {len(counts)} for counts in claims.values())
    with pytest.raises(PlanError):
        shares_of(0, 3, 1, 4)


def test_block_tables_are_cut_to_what_is_missing():
    whole = reading_of([5, 6, 7], [1, 2, 3], (16, 16), range(40), 0)
    assert whole and (whole.src_blocks, whole.dst_blocks, whole.tokens) == (
        [5, 6, 7], [1, 2, 3], range(40))  # fmt: skip
    rest = reading_of([5, 6], [1, 2, 3, 4], (32, 16), range(16, 50), 0)
    assert rest and (rest.src_blocks, rest.dst_blocks, rest.tokens) == (
        [5, 6], [1, 2, 3, 4], range(16, 50))  # fmt: skip
    assert reading_of([5], [1], (16, 16), range(16, 16), 0) is None


def test_a_sliding_window_needs_what_its_last_token_sees():
    window = reading_of([0, 0, 7], [0, 2, 3], (16, 16), range(48), 16)
    assert window and (window.src_blocks, window.dst_blocks, window.tokens) == (
        [7], [3], range(16))  # fmt: skip
    with pytest.raises(PlanError, match="has kept tokens 32"):
        reading_of([0, 0, 7], [0, 2, 3], (16, 16), range(48), 17)
    with pytest.raises(PlanError, match="has kept"):
        reading_of([0, 6, 7], [1, 2, 3], (16, 16), range(48), 0)
    with pytest.raises(PlanError, match="do not hold"):
        reading_of([6, 7], [1, 2, 3], (16, 16), range(48), 0)


@pytest.mark.parametrize("layout", [one.value for one in KVCacheLayout])
def test_tensors_are_described_by_layout_and_strides(layout: str):
    found = tensors(layout, 4, 16)
    cache = describe(named(found), [GROUP], KVCacheLayout(layout), "tokens")
    for view, tensor in zip(cache.memory.views[0], found, strict=True):
        assert view.data_ptr() == tensor.data_ptr() and view.stride() == tensor.stride()
    others = [one for one in KVCacheLayout if one.value != layout]
    for other in others:
        with pytest.raises(UsageError, match=r"strides|tensors|kv_caches"):
            describe(named(found), [GROUP], other, "tokens")


def test_only_what_the_views_cover_is_registered():
    raw = torch.zeros(3 * 24 * 4 * 16 * 2 * DIM + 999)
    found = list(raw[:-999].view(3, 24, 4, 16, 2 * DIM).unbind(0))
    cache = describe(named(found), [GROUP], KVCacheLayout.LBHNC, "tokens")
    assert sum(region.size for region in cache.memory.regions) == raw[:-999].nbytes


def test_kernels_blocks_may_be_smaller():
    group = LayerGroup(NAMES, 4, DIM, DIM, 64)
    found = tensors("LBNHC", 4, 16)
    cache = describe(named(found), [group], KVCacheLayout.LBNHC, "tokens")
    assert cache.block_size == 16 and cache.blocks([0, 2]) == [0, 0, 0, 0, 8, 9, 10, 11]


def test_groups_that_overlay_each_other_are_one_geometry():
    found = tensors("LBHNC", 4, 16)
    groups = [
        LayerGroup(NAMES, 4, DIM, DIM, 16),
        LayerGroup(("w.0", "w.1"), 4, DIM, DIM, 16, window=32),
    ]
    by_name = {**named(found), "w.0": found[0], "w.1": found[1]}
    cache = describe(by_name, groups, KVCacheLayout.LBHNC, "tokens")
    assert cache.memory.geometry.num_layers == 3
    with pytest.raises(UsageError, match="overlay"):
        describe({**by_name, "w.1": found[2]}, groups, KVCacheLayout.LBHNC, "tokens")
    other = [groups[0], LayerGroup(("w.0", "w.1"), 2, DIM, DIM, 16)]
    with pytest.raises(UsageError, match="whose blocks differ"):
        describe(by_name, other, KVCacheLayout.LBHNC, "tokens")


def named(found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda found: {NAMES[0]: found[0]}, "has brought no tensor"),
        (lambda found: named([one[..., :-1] for one in found]), "packed"),
        (lambda found: named([one[0] for one in found]), "is not .B, H"),
        (lambda found: named([one.to(torch.uint8) for one in found]), "kv_cache_dtype"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_as_declared_are_refused(change, text: str):
    with pytest.raises(UsageError, match=text):
        describe(change(tensors("LBHNC", 4, 16)), [GROUP], KVCacheLayout.LBHNC, "tokens")


def test_fp8_is_seen_as_what_it_is():
    found = [one.to(torch.uint8) for one in tensors("LBHNC", 4, 16)]
    whole = torch.stack(found)
    by_name = dict(zip(NAMES, whole.unbind(0), strict=True))
    cache = describe(by_name, [GROUP], KVCacheLayout.LBHNC, "tokens", "fp8_e5m2")
    assert cache.memory.geometry.specs[0].dtype == "float8_e5m2"


def test_attention_backends_whose_pages_are_not_known_are_refused():
    assert page_format(["FLASH_ATTN", "TRITON_ATTN"]) == "tokens"
    with pytest.raises(UsageError, match="B12X"):
        page_format(["B12X"])
    with pytest.raises(UsageError, match="differ"):
        page_format(["CPU_ATTN", "FLASH_ATTN"])
