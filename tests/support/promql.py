"""PromQL taken apart: which metrics, labels and values an expression relies on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser
from promql_parser import MatchOp

_PARTS = ("lhs", "rhs", "expr", "param", "vector_selector")


@dataclass
class Relies:
    """What an expression needs to be there."""

    selectors: list[promql_parser.VectorSelector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    """Of by, without, on, ignoring, group_left and group_right."""
    made: set[str] = field(default_factory=set)
    """Labels that label_replace or label_join makes."""


def relies(expression: str) -> Relies:
    """Raises ValueError for what is no PromQL."""
    found = Relies()
    for part in _walk(promql_parser.parse(expression)):
        if isinstance(part, promql_parser.VectorSelector):
            found.selectors.append(part)
        modifier = getattr(part, "modifier", None)
        for text in re.findall(r"\(([^)]*)\)", str(modifier) if modifier is not None else ""):
            found.labels |= {one.strip() for one in text.split(",") if one.strip()}
        if isinstance(part, promql_parser.Call) and part.func.name.startswith("label_"):
            found.made.add(part.args[1].val)
    return found


def _walk(part: object) -> Iterator[object]:
    yield part
    for name in _PARTS:
        below = getattr(part, name, None)
        if below is not None:
            yield from _walk(below)
    for below in getattr(part, "args", None) or ():
        yield from _walk(below)


def matches(matcher: promql_parser.Matcher, value: str) -> bool:
    """Whether a label of this value, '' where there is none, fits."""
    if matcher.op == MatchOp.Equal:
        return bool(value == matcher.value)
    if matcher.op == MatchOp.NotEqual:
        return bool(value != matcher.value)
    is_match = re.fullmatch(matcher.value, value) is not None
    return is_match if matcher.op == MatchOp.Re else not is_match
