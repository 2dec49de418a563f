"""What must never be so, by kind, so that campaigns can count each kind by itself."""

from __future__ import annotations


class Violation(AssertionError):
    """Of what `Service` checks after every fault."""


class WrongToken(Violation):
    """A token, or KV, that is not the reference's."""


class Leak(Violation):
    """Blocks, regions, descriptors or threads that nobody holds any more, and that are not free."""


class MoreHeld(Leak):
    """Descriptors or threads; UCX's own sockets are among them."""


class Hang(Violation):
    """A request without an end within its deadlines."""


class NoRecovery(Violation):
    """A service that serves nothing although all of it lives."""


class Crash(Violation):
    """An exception that nobody handled, or worse."""


KINDS: dict[str, type[Violation]] = {
    "wrong tokens": WrongToken,
    "leaks": Leak,
    "hangs": Hang,
    "no recovery": NoRecovery,
    "crashes": Crash,
}


def kind_of(problem: BaseException) -> str:
    """By the names of KINDS; 'other problems' for what is none of them."""
    return next((name for name, kind in KINDS.items() if isinstance(problem, kind)), OTHER)


OTHER = "other problems"
