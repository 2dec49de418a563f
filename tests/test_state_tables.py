"""Every state is in the table that its module draws, as a row of its own, and nothing else is."""

import importlib
import re

import pytest

MACHINES = [
    ("kvxfer.control.session", "PeerState", "peer"),
    ("kvxfer.worker.growth", "GrowthState", "state"),
    ("kvxfer.worker.residency", "ResidencyState", "state"),
    ("decode.schedule", "RequestState", "request"),
    ("prefill.job", "JobState", "state"),
    ("kvxfer.worker.draining", "DrainState", "worker"),
    ("kvxfer.serve.backend", "BackendState", "worker"),
]


@pytest.mark.parametrize("module, name, first", MACHINES)
def test_the_table_has_a_row_for_each_state(module, name, first):
    loaded = importlib.import_module(module)
    lines = (loaded.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"\| {first} +\|", line))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip())
    assert [row for row in rows if row] == [state.name for state in getattr(loaded, name)]


@pytest.mark.parametrize("module, name, first", MACHINES)
def test_each_row_names_only_states_as_its_ends(module, name, first):
    loaded = importlib.import_module(module)
    states = {state.name for state in getattr(loaded, name)}
    text = loaded.__doc__ or ""
    start = text.index(f"| {first} ")
    table = text[start : text.index("\n\n", start)] if "\n\n" in text[start:] else text[start:]
    named = set(re.findall(r"→ ([A-Z_]{4,})", table))
    assert named <= states
    assert len(named) >= len(states) - 1, "every state but one that a start leads to is an end"
