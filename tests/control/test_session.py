"""Two workers' facts, and whether KV may flow between them: the same answer at both ends."""

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.control.cache_messages import RegionsRevoke
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.messages import RegionsUpdate
from kvxfer.control.session import Peer, agree
from kvxfer.errors import HandshakeRejected, RegionError, WireError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.regions import Region

SPEC = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim_k": 8,
    "head_dim_v": 8,
    "dtype": "float32",
    "block_size": 4,
}


LANES = ["nixl/push", "nixl/pull"]


def make_facts(role, layout="LBHNC", capacity=16, spec=None, more=(), **changes):
    """`more`: specs of further groups, with one layout each."""
    specs = [KVCacheSpec(**{**SPEC, **(spec or {})}), *(one for one, _ in more)]
    layouts = [KVCacheLayout(layout), *(KVCacheLayout(name) for _, name in more)]
    geometry = CacheGeometry.build(specs, layouts, [capacity] * len(specs), 4096)
    facts = WorkerFacts(
        role=role,
        worker_id=f"{role}-0",
        incarnation="1",
        model="m",
        geometry=geometry,
        ranks=[RankFacts(1 << 30, b"", [])],
        lanes=LANES,
        local_lanes=[],
        host="one",
        tests_lanes=True,
        device="cpu",
        device_id="",
        regions=[Region(0, 4096)],
        generation=1,
        epoch=0,
        max_model_len=4096,
    )
    return msgspec.structs.replace(facts, **changes)


PREFILL = make_facts("prefill")
NIXL_PUSH, NIXL_PULL = (Lane("nixl", direction) for direction in Direction)

DIFFERENCES = {
    "model": {"model": "other"},
    "num_layers": {"spec": {"num_layers": 3}},
    "num_kv_heads": {"spec": {"num_kv_heads": 1}},
    "head_dim_k": {"spec": {"head_dim_k": 16}},
    "head_dim_v": {"spec": {"head_dim_v": 0}},
    "dtype": {"spec": {"dtype": "bfloat16"}},
    "block_size": {"spec": {"block_size": 6}},
    "kind": {"spec": {"kind": GroupKind.CROSS}},
    "role": {"role": "prefill"},
    "connector": {"lanes": ["loopback/push", "loopback/pull"]},
    "lane": {"lanes": ["nixl/pull"]},
}
ORDER = list(DIFFERENCES)


def different(*fields):
    changes = {"spec": {}}
    for field in fields:
        for key, value in DIFFERENCES[field].items():
            changes[key] = changes[key] | value if key == "spec" else value
    if {"connector", "lane"} <= set(fields):
        changes["lanes"] = ["loopback/pull"]
    role = changes.pop("role", "decode")
    return make_facts(role, **changes)


@pytest.mark.parametrize("field", ORDER)
def test_each_field_is_named_from_both_ends(field):
    ours = msgspec.structs.replace(PREFILL, lanes=["nixl/push"])
    theirs = different(field)
    with pytest.raises(HandshakeRejected) as here:
        agree(ours, theirs)
    with pytest.raises(HandshakeRejected) as there:
        agree(theirs, ours)
    assert here.value.field == there.value.field == field
    assert (here.value.ours, here.value.theirs) == (there.value.theirs, there.value.ours)
    assert here.value.ours != here.value.theirs or field == "role"
    assert "\n" not in str(here.value)


@pytest.mark.parametrize("pair", list(itertools.combinations(ORDER, 2)), ids="-".join)
def test_the_first_difference_is_the_one_that_is_named(pair):
    ours = msgspec.structs.replace(PREFILL, lanes=["nixl/push"])
    with pytest.raises(HandshakeRejected) as error:
        agree(ours, different(*pair))
    assert error.value.field == min(pair, key=ORDER.index)


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_layout_capacity_and_device_may_differ(layout):
    theirs = make_facts("decode", layout=layout, capacity=99, device="cpu")
    assert agree(PREFILL, theirs) == agree(theirs, PREFILL) == [NIXL_PUSH, NIXL_PULL]


@pytest.mark.parametrize("roles", [("single", "decode"), ("prefill", ""), ("decode", "decode")])
def test_only_prefill_and_decode_make_a_pair(roles):
    with pytest.raises(HandshakeRejected, match="role"):
        agree(make_facts(roles[0]), make_facts(roles[1]))


@pytest.fixture
def peer():
    found = Peer("in:00", 0.0)
    found.learn(make_facts("decode", capacity=1000), [NIXL_PUSH])
    return found


def update(generation, *regions):
    return RegionsUpdate(generation, list(regions), [b""], 0)


def test_updates_add_up_one_generation_after_the_other(peer):
    peer.grow(update(2, Region(8192, 4096)))
    peer.grow(update(3))
    peer.grow(update(4, Region(4096, 4096)))
    assert peer.regions.generation == 4
    assert peer.regions.regions == (Region(0, 4096), Region(4096, 4096), Region(8192, 4096))


@pytest.mark.parametrize("generation", [-1, 0, 1, 3, 4, 2**63])
def test_a_gap_or_a_repetition_is_refused_and_changes_nothing(peer, generation):
    before = peer.regions
    with pytest.raises(WireError, match=r"decode-0: regions of generation .* follow 1"):
        peer.grow(update(generation, Region(8192, 4096)))
    assert peer.regions == before


def test_regions_that_overlap_or_leave_the_cache_are_refused(peer):
    before, total = peer.regions, peer.facts.geometry.total_bytes
    for bad in (Region(0, 4096), Region(4095, 2), Region(total - 1, 2), Region(2**63, 1)):
        with pytest.raises((WireError, RegionError)):
            peer.grow(update(2, bad))
        assert peer.regions == before
    peer.grow(update(2, Region(total - 4096, 4096)))


def test_facts_with_impossible_regions_are_refused(peer):
    before = peer.regions, peer.facts
    for regions in ([Region(2**64 - 2, 1)], [Region(4096, 4096), Region(0, 4096)]):
        with pytest.raises((WireError, RegionError)):
            peer.learn(make_facts("decode", regions=regions), [NIXL_PULL])
    for address in (-1, 1 << 47, 2**64 - 1):
        with pytest.raises(WireError, match="base address"):
            peer.learn(make_facts("decode", ranks=[RankFacts(address, b"", [])]), [NIXL_PULL])
    assert (peer.regions, peer.facts) == before


def test_a_peer_is_called_by_its_worker_id_once_that_is_known():
    stranger = Peer("in:ab", 0.0)
    assert stranger.name == "in:ab"
    stranger.learn(make_facts("decode"), [NIXL_PUSH])
    assert stranger.name == "decode-0"


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_what_is_revoked_is_gone_and_names_the_lowest_block(layout):
    facts = make_facts("decode", layout=layout, capacity=64)
    (geometry,) = facts.geometry.groups
    stride, size = geometry.segment_stride_bytes, geometry.segment_block_bytes
    starts = [segment * stride for segment in range(geometry.num_segments)]
    regions = [Region(start, 4096) for start in starts if stride > 4096]
    regions += [Region(start + 4096, stride - 4096) for start in starts if stride > 4096]
    peer = Peer("in:00", 0.0)
    peer.learn(msgspec.structs.replace(facts, regions=sorted(regions)), [NIXL_PUSH])
    upper = [region for region in regions if region.offset % stride]
    assert peer.drop(RegionsRevoke(1, upper, [b""])) == [4096 // size]
    assert peer.regions.generation == 1
    with pytest.raises(RegionError, match="not registered"):
        peer.drop(RegionsRevoke(2, upper, [b""]))
    lower = list(peer.regions.regions)
    assert peer.drop(RegionsRevoke(2, lower, [b""])) == [0 if lower else geometry.capacity_blocks]
    assert peer.regions.regions == ()


def test_a_revoked_region_over_several_segments_may_hold_any_block():
    facts = make_facts("decode", capacity=64)
    stride = facts.geometry.groups[0].segment_stride_bytes
    odd = Region(stride - 4096, 8192)
    peer = Peer("in:00", 0.0)
    peer.learn(msgspec.structs.replace(facts, regions=[odd]), [NIXL_PUSH])
    assert peer.drop(RegionsRevoke(1, [odd], [b""])) == [0]


# --- several groups -------------------------------------------------------------------------------

SLIDING = KVCacheSpec(3, 1, 8, 4, "float32", 4, GroupKind.SLIDING, 5)
LATENT = KVCacheSpec(1, 1, 24, 0, "float16", 4, GroupKind.MLA)
GROUP_DIFFERENCES = {
    "num_layers": 4,
    "num_kv_heads": 2,
    "head_dim_k": 16,
    "head_dim_v": 8,
    "dtype": "bfloat16",
    "block_size": 6,
    "window": 6,
}


def several(role, *specs, layouts=("BLHNC", "LHBNC"), **changes):
    return make_facts(role, more=list(zip(specs, layouts, strict=True)), **changes)


@pytest.mark.parametrize("field", GROUP_DIFFERENCES)
def test_a_field_that_differs_is_named_with_its_group(field):
    other = dataclasses.replace(SLIDING, **{field: GROUP_DIFFERENCES[field]})
    ours, theirs = several("prefill", SLIDING, LATENT), several("decode", other, LATENT)
    for here, there, values in (
        (ours, theirs, (getattr(SLIDING, field), GROUP_DIFFERENCES[field])),
        (theirs, ours, (GROUP_DIFFERENCES[field], getattr(SLIDING, field))),
    ):
        with pytest.raises(HandshakeRejected) as error:
            agree(here, there)
        assert error.value.field == f"{field} of group 1"
        assert (error.value.ours, error.value.theirs) == values


def test_kinds_that_differ_are_named_with_their_group():
    plain = dataclasses.replace(SLIDING, kind=GroupKind.FULL, window=0)
    with pytest.raises(HandshakeRejected) as error:
        agree(several("prefill", LATENT, SLIDING), several("decode", LATENT, plain))
    assert error.value.field == "kind of group 2"


def test_the_number_of_groups_must_be_the_same():
    ours = several("prefill", SLIDING, LATENT)
    theirs = make_facts("decode", more=[(SLIDING, "BLHNC")])
    for here, there, counts in ((ours, theirs, (3, 2)), (theirs, ours, (2, 3))):
        with pytest.raises(HandshakeRejected) as error:
            agree(here, there)
        assert error.value.field == "groups"
        assert (error.value.ours, error.value.theirs) == counts


def test_the_same_groups_in_another_order_are_refused():
    with pytest.raises(HandshakeRejected, match="of group 1"):
        agree(several("prefill", SLIDING, LATENT), several("decode", LATENT, SLIDING))


@pytest.mark.parametrize("layouts", list(itertools.product(["LBHNC", "BHLNC"], repeat=2)))
def test_each_groups_layout_may_differ(layouts):
    theirs = several("decode", SLIDING, LATENT, layouts=layouts, capacity=99)
    ours = several("prefill", SLIDING, LATENT)
    assert agree(ours, theirs) == agree(theirs, ours) == [NIXL_PUSH, NIXL_PULL]


def bytes_of_block(group, block):
    """Every byte of one block, element by element."""
    spec = group.spec
    axes = (spec.num_layers, 1, spec.num_kv_heads, spec.block_size, spec.content_dim)
    for layer, _, head, token, content in itertools.product(*map(range, axes)):
        index = (layer, block, head, token, content)
        start = group.offset + sum(i * s for i, s in zip(index, group.strides, strict=True))
        yield from range(start, start + spec.itemsize)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layouts=st.tuples(*[st.sampled_from(list(KVCacheLayout))] * 2),
    capacity=st.integers(1, 5),
    data=st.data(),
)
def test_what_is_revoked_names_the_lowest_block_of_each_group(layouts, capacity, data):
    """Against looking for a byte of each block in the region. Never higher; and exact for what an
    owner revokes, which lies within a segment."""
    specs = [
        KVCacheSpec(2, 2, 1, 1, "float32", 2),
        KVCacheSpec(1, 1, 3, 0, "bfloat16", 3, GroupKind.SLIDING, 4),
    ]
    geometry = CacheGeometry.build(specs, layouts, [capacity, capacity], 8)
    total = geometry.total_bytes
    start = data.draw(st.integers(0, total - 1))
    region = Region(start, data.draw(st.integers(1, total - start)))
    facts = msgspec.structs.replace(make_facts("decode"), geometry=geometry, regions=[region])
    peer = Peer("in:00", 0.0)
    peer.learn(facts, [NIXL_PUSH])
    found = peer.drop(RegionsRevoke(1, [region], [b""]))
    for group, lowest in zip(geometry.groups, found, strict=True):
        touched = [
            block
            for block in range(capacity)
            if any(region.offset <= byte < region.end for byte in bytes_of_block(group, block))
        ]
        assert lowest <= min(touched, default=capacity)
        stride = group.segment_stride_bytes
        ends = range(group.offset + stride, group.end + 1, stride)
        crosses = [edge for edge in ends if region.offset < edge < region.end]
        padding = stride - capacity * group.segment_block_bytes
        if touched and not crosses:
            assert lowest == touched[0]
        elif not padding and not touched:
            assert lowest == capacity


def test_a_group_that_nothing_was_revoked_of_keeps_all_its_blocks():
    facts = several("decode", SLIDING, LATENT, capacity=64)
    groups = facts.geometry.groups
    regions = [Region(group.offset, 4096) for group in groups]
    for index, region in enumerate(regions):
        peer = Peer("in:00", 0.0)
        peer.learn(msgspec.structs.replace(facts, regions=regions), [NIXL_PUSH])
        expected = [group.capacity_blocks for group in groups]
        expected[index] = 0
        assert peer.drop(RegionsRevoke(1, [region], [b""])) == expected


# --- tensor-parallel ranks ------------------------------------------------------------------------


def ranked(role, size, heads, kind=GroupKind.FULL, replicas=1):
    """Facts of `size` ranks with `heads` KV heads each."""
    facts = make_facts(role, spec={"num_kv_heads": heads, "kind": kind, "replicas": replicas})
    ranks = [RankFacts(rank << 30, b"", []) for rank in range(size)]
    return msgspec.structs.replace(facts, ranks=ranks)


@pytest.mark.parametrize("mine", [1, 2, 4])
@pytest.mark.parametrize("yours", [1, 2, 4])
def test_any_two_sizes_agree_on_the_heads_of_one_model(mine, yours):
    ours, theirs = ranked("prefill", mine, 4 // mine), ranked("decode", yours, 4 // yours)
    assert agree(ours, theirs) == agree(theirs, ours) != []


@pytest.mark.parametrize("other", [(1, 2), (2, 1), (4, 1, GroupKind.FULL, 2)])
def test_more_ranks_than_heads_agree_with_any_that_have_as_many_heads(other):
    ours, theirs = ranked("prefill", 4, 1, replicas=2), ranked("decode", *other)
    assert agree(ours, theirs) == agree(theirs, ours) != []


def test_replicas_that_do_not_fit_are_named():
    plenty = ranked("prefill", 4, 1, replicas=2)
    with pytest.raises(HandshakeRejected) as heads:
        agree(plenty, ranked("decode", 4, 1))
    assert (heads.value.field, heads.value.ours, heads.value.theirs) == ("num_kv_heads", 2, 4)
    for wrong in (ranked("decode", 3, 1, replicas=2), ranked("decode", 2, 1, replicas=4)):
        with pytest.raises(HandshakeRejected, match="replicas"):
            agree(plenty, wrong)


def test_a_latent_is_whole_on_every_rank():
    assert agree(ranked("prefill", 3, 1, GroupKind.MLA), ranked("decode", 2, 1, GroupKind.MLA))


@pytest.mark.parametrize(
    ("ours", "theirs", "field", "told"),
    [
        ((1, 4), (3, 1), "tensor_parallel_size", (1, 3)),
        ((2, 2), (3, 2), "tensor_parallel_size", (2, 3)),
        ((2, 2), (1, 2), "num_kv_heads", (4, 2)),
        ((2, 2), (2, 1), "num_kv_heads", (4, 2)),
        ((1, 2), (0, 2), "tensor_parallel_size", (1, 0)),
        ((1, 9), (9, 1), "tensor_parallel_size", (1, 9)),
    ],
)
def test_sizes_and_heads_that_do_not_fit_are_named(ours, theirs, field, told):
    pair = ranked("prefill", *ours), ranked("decode", *theirs)
    with pytest.raises(HandshakeRejected) as here:
        agree(*pair)
    with pytest.raises(HandshakeRejected) as there:
        agree(*pair[::-1])
    assert here.value.field == there.value.field == field
    assert (here.value.ours, here.value.theirs) == told == (there.value.theirs, there.value.ours)


def test_a_description_is_needed_of_each_rank():
    peer = Peer("out:x", 0.0)
    facts = ranked("decode", 2, 1)
    peer.learn(facts, [NIXL_PUSH])
    found = peer.described([b"a", b"b"])
    assert [(rank.base_address, rank.description) for rank in found] == [(0, b"a"), (1 << 30, b"b")]
    for wrong in ([], [b"a"], [b"a"] * 3):
        with pytest.raises(WireError, match=f"{len(wrong)} descriptions for 2 ranks"):
            peer.described(wrong)


def test_a_wrong_base_address_of_any_rank_is_refused():
    facts = ranked("decode", 2, 1)
    facts.ranks[1] = RankFacts(-1, b"", [])
    with pytest.raises(WireError, match="base address"):
        Peer("out:x", 0.0).learn(facts, [NIXL_PUSH])
