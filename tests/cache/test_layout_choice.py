"""Which layout each group gets, and who said so."""

import itertools

import pytest

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.layout_choice import FIELD, LayoutChoice, Wish, choose_layouts
from kvxfer.cache.spec import GroupKind
from kvxfer.errors import UsageError

FULL, SLIDING, MLA, CROSS = GroupKind.FULL, GroupKind.SLIDING, GroupKind.MLA, GroupKind.CROSS
NOBODY = Wish("", "nobody")
RANKS = ("override", "forced", "asked", "preferred")
NAMES = dict(zip(RANKS, ["BLHNC", "LHBNC", "LBHNC", "BHLNC"], strict=True))


def choose(kinds, **wishes):
    ranks = {rank: Wish(wishes.get(rank, ""), f"the {rank} one") for rank in RANKS}
    return choose_layouts(kinds, **ranks)


def layouts(kinds, **wishes):
    return [choice.layout.value for choice in choose(kinds, **wishes)]


@pytest.mark.parametrize(
    "given",
    [ranks for n in range(5) for ranks in itertools.combinations(RANKS, n)],
    ids=lambda ranks: "-".join(ranks) or "nobody",
)
def test_the_highest_rank_that_wants_something_gets_it(given):
    """Every set of ranks that speak, each wanting another layout."""
    wishes = {rank: NAMES[rank] for rank in given}
    if "override" not in given and {"forced", "asked"} <= set(given):
        with pytest.raises(UsageError):
            choose([FULL], **wishes)
        return
    expected = LayoutChoice(KVCacheLayout.LBNHC, "the default")
    if given:
        expected = LayoutChoice(KVCacheLayout(NAMES[given[0]]), f"the {given[0]} one")
    assert choose([FULL, MLA], **wishes) == [expected, expected]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_each_rank_may_want_each_layout_in_any_case(rank, layout):
    for text in (layout.value, layout.value.lower()):
        assert layouts([FULL, SLIDING, CROSS], **{rank: text}) == [layout.value] * 3


@pytest.mark.parametrize("rank", RANKS)
def test_a_wish_by_kind_leaves_the_other_kinds_to_lower_ranks(rank):
    kinds = [FULL, SLIDING, FULL, MLA]
    text = "full=BLHNC, sliding=lhbnc"
    assert layouts(kinds, **{rank: text}) == ["BLHNC", "LHBNC", "BLHNC", "LBNHC"]
    for lower in RANKS[RANKS.index(rank) + 1 :]:
        if (rank, lower) != ("forced", "asked"):
            wishes = {rank: text, lower: "BHLNC"}
            assert layouts(kinds, **wishes) == ["BLHNC", "LHBNC", "BLHNC", "BHLNC"]


def test_kinds_may_come_from_four_ranks():
    wishes = {
        "override": "full=BLHNC",
        "forced": "sliding=LHBNC",
        "asked": "mla=LBHNC",
        "preferred": "BHLNC",
    }
    assert layouts([FULL, SLIDING, MLA, CROSS], **wishes) == ["BLHNC", "LHBNC", "LBHNC", "BHLNC"]


@pytest.mark.parametrize("asked", ["LBHNC", "full=LBNHC,sliding=LBHNC"])
def test_a_user_who_asks_for_other_than_what_is_forced_is_told_both(asked):
    with pytest.raises(UsageError) as error:
        choose([FULL, SLIDING], asked=asked, forced="sliding=BLHNC")
    assert (error.value.field, error.value.value) == (FIELD, asked)
    for part in ("the asked one", "the forced one", "BLHNC", "sliding"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_user_who_asks_for_what_is_forced_is_no_conflict():
    assert layouts([FULL, SLIDING], asked="BLHNC", forced="sliding=BLHNC") == ["BLHNC", "BLHNC"]
    assert layouts([FULL, SLIDING], asked="full=LBHNC", forced="sliding=BLHNC") == [
        "LBHNC", "BLHNC",
    ]  # fmt: skip


def test_a_preference_gives_way_to_what_is_forced_in_silence():
    assert layouts([FULL], forced="BLHNC", preferred="LHBNC") == ["BLHNC"]


def test_an_override_is_above_a_conflict():
    found = choose([FULL], override="LHBNC", forced="BLHNC", asked="LBHNC")
    assert found == [LayoutChoice(KVCacheLayout.LHBNC, "the override one")]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("NHBLC", "NHBLC"),
        ("full=NHBLC", "NHBLC"),
        ("full", "full"),
        ("full=", "''"),
        ("half=LBNHC", "'half'"),
        ("=LBNHC", "''"),
        ("full=LBNHC,", "''"),
        ("FULL=LBNHC", "'FULL'"),
        ("full=LBNHC=BLHNC", "LBNHC=BLHNC"),
        ("LBNHC,sliding=BLHNC", "'LBNHC'"),
    ],
)
def test_what_names_no_layout_or_no_kind_is_refused(rank, text, named):
    with pytest.raises(UsageError) as error:
        choose([FULL, SLIDING], **{rank: text})
    assert error.value.field == FIELD
    assert named in str(error.value)


def test_a_kind_that_no_group_has_is_refused_where_the_user_named_it():
    with pytest.raises(UsageError, match=r"no group is sliding: there are full, cross") as error:
        choose([FULL, CROSS, FULL], asked="full=LBNHC,sliding=BLHNC")
    assert error.value.value == "full=LBNHC,sliding=BLHNC"
    for rank in ("override", "forced", "preferred"):
        assert layouts([FULL], **{rank: "sliding=BLHNC"}) == ["LBNHC"]


def test_a_kind_that_is_named_twice_is_the_last_one():
    """As with any option that is given twice."""
    assert Wish("full=LBNHC,full=BLHNC", "x").by_kind() == {FULL: KVCacheLayout.BLHNC}


def test_no_wish_names_no_kind():
    assert NOBODY.by_kind() == {}
