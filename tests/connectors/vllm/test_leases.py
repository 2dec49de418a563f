"""Whose KV is kept, and for how long: each row of the table in connectors/vllm/leases.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from connectors.vllm.handover import Offer
from connectors.vllm.leases import EARLY_S, Leases

TIMEOUT_S = 100.0


def offered(leases: Leases, name: str = "l", now_s: float = 0.0) -> list[str]:
    return leases.offer(Offer(f"request {name}", name, 9, ([1],)), now_s)


def test_all_readers_have_to_be_done():
    leases = Leases(TIMEOUT_S)
    offered(leases)
    assert leases.claim("a", "l", 2, 1) is not None
    assert leases.done("a", "l")
    assert not leases.take_freed()  # the other one has not come yet
    assert leases.claim("b", "l", 2, 2) is not None
    assert leases.claim("c", "l", 2, 2) is None
    assert leases.done("b", "l")
    assert leases.take_freed() == {"request l"} and len(leases) == 0
    assert not leases.done("b", "l") and leases.claim("b", "l", 2, 3) is None


def test_a_deadline_closes_but_never_breaks():
    leases = Leases(TIMEOUT_S)
    offered(leases)
    leases.claim("a", "l", 2, 1)
    leases.expire(TIMEOUT_S + 1)
    assert leases.claim("b", "l", 2, TIMEOUT_S + 2) is None
    assert not leases.take_freed() and leases.num_expired == 1
    assert leases.done("a", "l")
    assert leases.take_freed() == {"request l"}


def test_who_is_lost_is_done_and_no_longer_confirmed():
    leases = Leases(TIMEOUT_S)
    offered(leases)
    leases.claim("a", "l", 1, 1)
    assert leases.lose("a") == 1
    assert leases.take_freed() == {"request l"} and not leases.done("a", "l")


def test_early_claims_wait_for_their_offer():
    leases = Leases(TIMEOUT_S)
    assert leases.claim("a", "l", 1, 0) is None and leases.waits("a", "l")
    assert leases.claim("b", "m", 1, 0) is None
    assert not leases.done("b", "m")  # given up before there was anything
    assert offered(leases) == ["a"] and offered(leases, "m") == []
    assert leases.take_freed() == {"request m"}
    assert leases.claim("c", "never", 1, 0) is None
    assert leases.expire(EARLY_S + 1) == [("c", "never")]
    assert not leases.waits("c", "never")


def test_memory_that_goes_breaks_all():
    leases = Leases(TIMEOUT_S)
    offered(leases)
    offered(leases, "m")
    leases.claim("a", "l", 1, 1)
    leases.break_all()
    assert leases.take_freed() == {"request l", "request m"} and not leases.done("a", "l")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "claim", "done", "lose", "expire"]),
        st.sampled_from("ab"),
        st.sampled_from("lm"),
    ),
    max_size=25,
)


@settings(max_examples=examples(40, 5000), deadline=None, derandomize=True)
@given(STEPS)
def test_nothing_is_freed_under_a_reader_nor_twice_nor_never(steps: list[tuple[str, str, str]]):
    leases, now_s = Leases(TIMEOUT_S), 0.0
    reading: set[tuple[str, str]] = set()
    known: set[str] = set()
    freed: set[str] = set()
    for what, peer, lease in steps:
        now_s += 1
        if what == "offer" and lease not in known:
            known.add(lease)
            reading |= {(early, lease) for early in offered(leases, lease, now_s)}
        elif what == "claim" and leases.claim(peer, lease, 2, now_s):
            reading.add((peer, lease))
        elif what == "done":
            assert leases.done(peer, lease) == ((peer, lease) in reading)
            reading.discard((peer, lease))
        elif what == "lose":
            leases.lose(peer)
            reading = {pair for pair in reading if pair[0] != peer}
        elif what == "expire":
            now_s += TIMEOUT_S / 2
            leases.expire(now_s)
        new = leases.take_freed()
        assert not new & freed
        freed |= new
        assert not {f"request {lease}" for _, lease in reading} & freed
    for peer in "ab":
        leases.lose(peer)
    leases.expire(now_s + 2 * TIMEOUT_S)
    assert freed | leases.take_freed() == {f"request {lease}" for lease in known}
    assert len(leases) == 0
