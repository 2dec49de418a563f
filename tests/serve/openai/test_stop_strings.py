"""Stop strings, against the definition: text that comes character by character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.serve.openai.stop_strings import StopStrings

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def by_definition(text: str, stops: list[str], includes: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if includes else end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, max_size=12), stop_lists, st.booleans())
def test_however_text_is_cut_into_tokens_it_ends_where_it_ends(
    parts: list[str], stops: list[str], includes: bool
) -> None:
    stream = StopStrings(stops, includes=includes)
    whole, told = "".join(parts), ""
    expected, by = by_definition(whole, stops, includes)
    for part in parts:
        told += stream.push(part)
        assert expected.startswith(told), "what was told cannot be taken back"
    if stream.stopped_by is None:
        told += stream.finish()
    assert (told, stream.stopped_by) == (expected, by)


@settings(deadline=None, max_examples=60)
@given(texts, stop_lists)
def test_no_more_is_held_back_than_a_stop_string_may_need(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    told = stream.push(text)
    if stream.stopped_by is None:
        held = text[len(told) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("parts", "stops", "told"),
    [
        (["KING.", "\n", "\n", "QUEEN"], ["\n\n"], "KING."),
        (["abab", "c"], ["abc"], "ab"),
        (["x€", "yz"], ["€y"], "x"),
        (["abcd"], ["abcd", "bc"], "a"),  # 'bc' is complete first
        (["abcd"], ["bcd", "d", "cd"], "a"),  # all end together: the longest
    ],
)
def test_examples(parts: list[str], stops: list[str], told: str) -> None:
    stream = StopStrings(stops)
    assert "".join(map(stream.push, parts)) + stream.finish() == told
    assert stream.stopped_by in stops
    assert stream.push("more") == ""
