"""How far an attack came, by decoder and by handler, and the figures of it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass

from support.attack import Attack
from support.wrong_messages import TYPES

from kvxfer.bench.report import Figure
from kvxfer.serve.router import Router

NAME = "fuzz"
GROWTH_BYTES = 24 << 20
"""What allocators keep, at the most; a leak of 1 KiB a message would be four times that."""
GROWTH_FILES = 40
"""Connections that come and go. All are gone at the end: the fixture `cluster` looks."""


@dataclass(frozen=True)
class Coverage:
    """Of what is registered, what was reached."""

    what: str
    reached: frozenset[str]
    registered: frozenset[str]

    @property
    def missing(self) -> list[str]:
        return sorted(self.registered - self.reached)

    def __str__(self) -> str:
        missing = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        num = len(self.reached & self.registered)
        return f"{self.what}: {num} of {len(self.registered)}{missing}"

    def figure(self) -> Figure:
        num, of = len(self.reached & self.registered), len(self.registered)
        return Figure(f"{NAME}: {self.what} reached", num, f"of {of}", of, "higher", 1, 0.0)


def coverage(found: Attack) -> list[Coverage]:
    """Every type of message is decoded by all three, and every handler is called."""
    types = frozenset(TYPES)
    made = [
        Coverage(f"decoders of {role}", frozenset(delivered), types)
        for role, delivered in found.delivered.items()
    ]
    for role, worker in (("prefill", found.prefill), ("decode", found.decode)):
        handled = frozenset(name.rpartition(" ")[0] for name in found.handled[role])
        registered = frozenset(kind.__name__ for kind in worker.loop._handlers)
        made.append(Coverage(f"handlers of {role}", handled, registered))
    # a router has no table of them: what it matches by name
    reached = frozenset(found.delivered["router"])
    made.append(Coverage("handlers of router", reached, frozenset(matched(Router._receive))))
    return made


def matched(function: object) -> set[str]:
    """The classes that the match statements of `function` name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    return {ast.unparse(one.cls) for one in ast.walk(tree) if isinstance(one, ast.MatchClass)}


def turned_away(found: Attack) -> dict[str, int]:
    """By both workers, by kind."""
    kinds = ("malformed_messages", "misplaced_messages", "wrong_messages", "refused_connections")
    told = [found.turned_away(worker) for worker in (found.prefill, found.decode)]
    return {kind: sum(int(one[kind]) for one in told) for kind in kinds}


def figures(
    found: Attack, wanted: int, grown: tuple[int, int], took_s: float, crashes: int
) -> list[Figure]:
    """`grown`: bytes and descriptors, after the first quarter."""

    def told(what: str, value: float, unit: str = "", bar: float | None = None) -> Figure:
        return Figure(f"{NAME}: {what}", value, unit, bar, "higher", 1, 0.0)

    def most(what: str, value: float, bar: float, unit: str = "") -> Figure:
        return Figure(f"{NAME}: {what}", value, unit, bar, "lower", 1, 0.0)

    sent = found.sent.total()
    return [
        told("sent", sent, "messages", wanted),
        *(told(f"sent with {how}", number, "messages") for how, number in found.sent.items()),
        told("sent a second, and taken in", sent / took_s, "/s"),
        *(told(what.replace("_", " "), n, bar=1) for what, n in turned_away(found).items()),
        told("answers of the workers", found.num_answers, "messages"),
        most("answers to who has no key or a wrong one", found.num_answered_strangers, 0),
        most("messages taken from who has no key or a wrong one", found.num_of_strangers, 0),
        most("crashes of a worker or a router", crashes, 0),
        most("RSS grown", grown[0], GROWTH_BYTES, "bytes"),
        most("descriptors grown", grown[1], GROWTH_FILES, "files"),
        *(one.figure() for one in coverage(found)),
    ]
