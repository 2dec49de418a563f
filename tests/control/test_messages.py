"""Bytes to messages and back; everything else is a WireError."""

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.layout import (
    MAX_ADDRESSES,
    MAX_GROUPS,
    CacheGeometry,
    GroupGeometry,
    KVCacheLayout,
)
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.control import messages as m
from kvxfer.control import wire
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.errors import WireError
from kvxfer.transfer.regions import Region

BUDGET = settings(max_examples=120, deadline=None, derandomize=True)
SPEC = KVCacheSpec(2, 2, 8, 8, "float32", 4)
WINDOWED = KVCacheSpec(3, 1, 8, 4, "bfloat16", 4, GroupKind.SLIDING, 5)
LATENT = KVCacheSpec(1, 1, 24, 0, "float16", 4, GroupKind.MLA)
GEOMETRY = CacheGeometry.build(
    [SPEC, WINDOWED, LATENT],
    [KVCacheLayout.BLHNC, KVCacheLayout.LBHNC, KVCacheLayout.LHBNC],
    [100, 7, 33],
    4096,
)
FACTS = WorkerFacts(
    role="decode",
    worker_id="decode-0",
    incarnation="ab",
    model="f" * 32,
    geometry=GEOMETRY,
    ranks=[RankFacts(0x7F0000000000, bytes(range(256)), [b""])],
    lanes=["nixl/push", "nixl/pull"],
    local_lanes=[],
    host="one",
    device_id="",
    tests_lanes=True,
    device="cuda:1",
    regions=[Region(0, 4096), Region(4096, 65536)],
    generation=3,
    epoch=0,
)
STATS = m.TransferStats(1 << 40, 2, 3, 4, 5, 6)
EXAMPLES = [
    m.Hello(m.WIRE_VERSION, FACTS),
    m.Hello(m.WIRE_VERSION, None),
    m.Welcome(m.WIRE_VERSION, FACTS, "push"),
    m.Reject("model", "a", "b"),
    m.Heartbeat(),
    m.Goodbye("bye"),
    m.RegionsUpdate(4, [Region(1 << 40, 1)], [b"\0\xff"], 0),
    m.RegionsAck(4),
    m.Generate("r", [1, 2], 3, m.Sampling(0.5, 0.9, 2**63), [0], "", True),
    m.Cancel("r"),
    m.Token("r", 0, 5),
    m.Finished("r", "overloaded", "", 3, STATS, ["ab"], 9, 1.5),
    m.PrefillRequest("r", [], m.Sampling(), m.Grant("g", [[1, 2], [], [3]], 0.5, 32), True),
    m.PrefillRequest("r", [1], m.Sampling(), m.Grant("g", None, 0.5, 0), False),
    m.Starting("r", "g"),
    m.Granted("r", "g", [[1, 2], []], 0),
    m.Granted("r", "g", [[2]], 16),
    m.Busy("r", "g", 0.25),
    m.Ready("r", m.Lease("g", [[], [5]], 1.0), 0, 16, [(0, 2), (1, 3)], True),
    m.Taken("r", "g"),
    m.FirstToken("r", "g", 9),
    m.Confirmed("r", "g", 5, None),
    m.Done("r", "g", 10, 0, 2, 4, 5, STATS, 2**64 - 1),
    m.Done("r", "g", 10, 4, 2, 4, 5, STATS, None),
    m.Abort("r", "g", "why"),
    m.Aborted("r", "g"),
    m.Failed("r", "g", "why"),
    m.HelloWanted(),
    m.RegionsAt(1, 4),
    m.RegionsQuery(),
    m.RegionsState(1, 4, [Region(0, 4096)], [b"\0\xff"]),
    m.GrantQuery("r", "g", 8, [1, 0], 16),
    m.GrantUnknown("r", "g"),
    m.StatusQuery(),
    m.Status("w", {"i": 1, "f": 0.5, "s": "text"}),
    m.RegionsRevoke(2, [Region(0, 4096)], [b"\0\xff"]),
    m.RegionsRevoked(2),
    m.Shrink([5, 1], 0.5),
    m.Sleep(0.5),
    m.WakeUp(),
    m.Defragment(0.5),
    m.Drain("the host goes away"),
    m.Prefills(["tcp://10.0.0.2:5600#prefill-0"]),
    m.CacheState("Sleep", "why", True, [1, 0], 0, 4096, 8192),
    m.LaneTrial("t", 32, [3, 4]),
    m.LaneReady("t", [1, 2]),
    m.LanePush("t", "nixl/push", 32),
    m.LanePushed("t", "nixl/push", 32, 1_000, ""),
    m.LaneChosen("t", "nixl/push", 3.5, ["nixl/push", "nixl/pull"]),
]
every_example = pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)


def test_there_is_an_example_of_every_message():
    assert {type(example) for example in EXAMPLES} == set(m.Message.__args__)


@every_example
def test_round_trip(message):
    data = wire.encode(message)
    again = wire.decode(data)
    assert again == message
    assert type(again) is type(message)
    assert wire.encode(again) == data


@every_example
def test_every_truncation_and_any_tail_is_refused(message):
    data = wire.encode(message)
    cuts = range(len(data)) if len(data) < 200 else range(0, len(data), 7)
    for cut in cuts:
        with pytest.raises(WireError):
            wire.decode(data[:cut])
    with pytest.raises(WireError):
        wire.decode(data + b"\0")


def raw(message):
    """The message as plain maps and lists."""
    return msgspec.msgpack.decode(wire.encode(message))


def refused(value):
    with pytest.raises(WireError) as error:
        wire.decode(msgspec.msgpack.encode(value))
    assert "\n" not in str(error.value)


@every_example
def test_unknown_and_missing_fields_are_refused(message):
    value = raw(message)
    refused(value | {"surprise": 1})
    for name in value.keys() - {"type"}:
        refused({key: value[key] for key in value if key != name})
    refused({key: value[key] for key in value if key != "type"})
    refused(value | {"type": "Nonsense"})


@every_example
def test_wrong_types_are_refused(message):
    value = raw(message)
    for name in value:
        refused(value | {name: {"a": [1.5]}})


def test_unknown_fields_deeper_down_are_refused():
    value = raw(m.Hello(m.WIRE_VERSION, FACTS))
    refused(value | {"facts": value["facts"] | {"surprise": 1}})
    grant = raw(EXAMPLES[12])
    refused(grant | {"grant": grant["grant"] | {"surprise": 1}})
    refused(grant | {"sampling": grant["sampling"] | {"temperature": "hot"}})


def with_groups(groups):
    """Our Hello, as plain values, with other groups in its geometry."""
    value = raw(m.Hello(m.WIRE_VERSION, FACTS))
    return value | {"facts": value["facts"] | {"geometry": {"groups": groups}}}


def plain_groups():
    return raw(m.Hello(m.WIRE_VERSION, FACTS))["facts"]["geometry"]["groups"]


BAD_GROUP = {
    "strides": [1, 2, 3, 4, 5],
    "too few strides": [1, 2],
    "capacity_blocks": 0,
    "granularity": 3000,
    "layout": "HNCBL",
}


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("what", BAD_GROUP)
def test_a_geometry_that_is_none_is_a_wire_error(what, index):
    field, groups = "strides" if "strides" in what else what, plain_groups()
    groups[index] = groups[index] | {field: BAD_GROUP[what]}
    refused(with_groups(groups))


def moved(group, by):
    return group | {"offset": group["offset"] + by}


BAD_ROWS = {
    "none": lambda a, b, c: [],
    "the second missing": lambda a, b, c: [a, c],
    "two swapped": lambda a, b, c: [b, a, c],
    "one twice": lambda a, b, c: [a, a, b, c],
    "a gap before the first": lambda a, b, c: [moved(g, 4096) for g in (a, b, c)],
    "a gap between two": lambda a, b, c: [a, b, moved(c, 4096)],
    "an overlap": lambda a, b, c: [a, moved(b, -4096), moved(c, -4096)],
    "all at the start": lambda a, b, c: [g | {"offset": 0} for g in (a, b, c)],
    "a granularity of its own": lambda a, b, c: [a, b | {"granularity": 1024}, c],
    "an offset inside a granule": lambda a, b, c: [a, b, moved(c, 8)],
    "a negative offset": lambda a, b, c: [moved(a, -4096), b, c],
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_groups_that_do_not_follow_each_other_are_a_wire_error(row):
    assert wire.decode(msgspec.msgpack.encode(with_groups(plain_groups()))) == m.Hello(
        m.WIRE_VERSION, FACTS
    )
    refused(with_groups(BAD_ROWS[row](*plain_groups())))


def many_groups(count):
    layouts = [KVCacheLayout.BLHNC] * count
    return CacheGeometry.build([SPEC] * count, layouts, [1] * count, 4096)


def test_the_number_of_groups_has_a_bound():
    full = many_groups(MAX_GROUPS)
    facts = msgspec.structs.replace(FACTS, geometry=full)
    assert wire.decode(wire.encode(m.Hello(m.WIRE_VERSION, facts))).facts == facts
    groups = raw(m.Hello(m.WIRE_VERSION, facts))["facts"]["geometry"]["groups"]
    refused(with_groups([*groups, moved(groups[-1], full.groups[0].total_bytes)]))


def test_groups_that_together_need_too_many_addresses_are_a_wire_error():
    """Each by itself could be."""
    capacity = MAX_ADDRESSES // SPEC.block_bytes - 1
    huge = raw(m.Hello(m.WIRE_VERSION, FACTS))["facts"]["geometry"]["groups"][0]
    alone = GroupGeometry.build(SPEC, KVCacheLayout.BLHNC, capacity, 4096)
    first = huge | {"capacity_blocks": capacity, "strides": list(alone.strides)}
    found = wire.decode(msgspec.msgpack.encode(with_groups([first])))
    assert found.facts.geometry.groups == (alone,)
    refused(with_groups([first, first | {"offset": alone.end}]))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 0},
        {"num_layers": -1},
        {"num_layers": 2**63},
        {"dtype": "float99"},
        {"block_size": 2**64 - 1, "num_kv_heads": 2**64 - 1},
        {"head_dim_v": -1},
        {"kind": "half"},
        {"kind": "sliding"},
        {"window": 4},
        {"window": -1},
        {"kind": "mla"},
    ],
)
def test_a_spec_that_is_none_is_a_wire_error(changes):
    value = raw(m.Welcome(m.WIRE_VERSION, FACTS, "push"))
    groups = value["facts"]["geometry"]["groups"]
    groups[0] = groups[0] | {"spec": groups[0]["spec"] | changes}
    refused(value | {"facts": value["facts"] | {"geometry": {"groups": groups}}})


@pytest.mark.parametrize("region", [[0, 0], [-1, 5], {"offset": 4, "size": -4}, {"offset": 4}])
def test_a_region_that_is_none_is_a_wire_error(region):
    refused(raw(EXAMPLES[6]) | {"regions": [region]})


@BUDGET
@given(st.binary(max_size=300))
def test_random_bytes_are_a_wire_error_or_a_message(data):
    try:
        message = wire.decode(data)
    except WireError:
        return
    assert isinstance(message, m.Message.__args__)


@BUDGET
@given(st.sampled_from(EXAMPLES), st.data())
def test_flipped_bytes_are_a_wire_error_or_a_message(message, data):
    damaged = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(wire.decode(bytes(damaged)), m.Message.__args__)
    except WireError as error:
        assert str(error)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@BUDGET
@given(st.sampled_from(EXAMPLES), st.data())
def test_any_value_in_any_field_is_a_wire_error_or_a_message(message, data):
    value = raw(message)
    name = data.draw(st.sampled_from(sorted(value)))
    try:
        wire.decode(msgspec.msgpack.encode(value | {name: data.draw(json_like)}))
    except WireError as error:
        assert str(error)


def test_deep_nesting_is_a_wire_error():
    with pytest.raises(WireError):
        wire.decode(b"\x91" * 100_000 + b"\x00")
    with pytest.raises(WireError):
        wire.decode(b"\x81\xa1a" * 100_000 + b"\x00")


@pytest.mark.parametrize("version", [0, m.WIRE_VERSION - 1, m.WIRE_VERSION + 1, 77, -1])
def test_another_versions_hello_is_known_by_its_version(version):
    strange = {"type": "Hello", "wire_version": version, "facts": 5, "and": {"much": ["more"]}}
    assert wire.decode(msgspec.msgpack.encode(strange)) == m.Hello(version, None)
    value = raw(m.Hello(m.WIRE_VERSION, FACTS)) | {"wire_version": version}
    assert wire.decode(msgspec.msgpack.encode(value | {"new": 1})).wire_version == version


def test_a_strange_hello_of_our_own_version_is_refused():
    refused({"type": "Hello", "wire_version": m.WIRE_VERSION, "facts": 5})
    refused({"type": "Hello", "wire_version": str(m.WIRE_VERSION), "facts": None})
    refused({"type": "Welcome", "wire_version": m.WIRE_VERSION, "facts": None})


def test_messages_have_a_bound_on_either_side():
    with pytest.raises(WireError, match="larger than"):
        wire.decode(bytes(wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(WireError, match=r"Goodbye of \d+ bytes is larger than"):
        wire.encode(m.Goodbye("x" * wire.MAX_MESSAGE_BYTES))
    long = m.Goodbye("x" * (wire.MAX_MESSAGE_BYTES - 100))
    assert wire.decode(wire.encode(long)) == long


def test_the_largest_hello_fits():
    regions = [Region(index * 4096, 4096) for index in range(100_000)]
    facts = msgspec.structs.replace(
        FACTS, regions=regions, ranks=[RankFacts(1 << 40, bytes(4 << 20), [])]
    )
    data = wire.encode(m.Hello(m.WIRE_VERSION, facts))
    assert len(data) < wire.MAX_MESSAGE_BYTES
    assert wire.decode(data).facts.regions == regions


def test_geometry_is_checked_again_at_the_other_end():
    """Whatever passes is exactly what this side would have computed itself."""
    found = wire.decode(wire.encode(m.Hello(m.WIRE_VERSION, FACTS))).facts.geometry
    layouts = [group.layout for group in found.groups]
    capacities = [group.capacity_blocks for group in found.groups]
    built = CacheGeometry.build(found.specs, layouts, capacities, found.granularity)
    assert dataclasses.asdict(built) == dataclasses.asdict(found) == dataclasses.asdict(GEOMETRY)
