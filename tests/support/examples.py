"""How many examples a property is tried with."""

import os

SLOW = "KVXFER_TEST_SLOW"
"""In the environment of a run with --slow."""


def examples(few: int, many: int) -> int:
    """`many` with --slow. `few` are the first of the same ones where they are derandomized, and
    were checked to reach the same lines of what is tested."""
    return many if os.environ.get(SLOW) else few
