"""What the campaigns of tests/faults found, as figures of the format that benchmarks write."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from support.violations import KINDS, OTHER

from kvxfer.bench.report import Figure, describe_machine, write_figures

CAMPAIGNS = {
    "test_every_state": ("control-faults", "every state"),
    "test_field_failures": ("control-faults", "field failures"),
    "test_messages": ("control-messages", "messages"),
    "test_links": ("control-links", "links"),
    "test_fuzz": ("control-fuzz", "fuzz"),
    "test_fuzz_connectors": ("control-fuzz", "fuzz"),
}
"""By module: the file, without .json, and the campaign's name."""

ROUNDS_VARIABLE = "KVXFER_FAULT_ROUNDS"
ROUNDS = int(os.environ.get(ROUNDS_VARIABLE, "1"))
"""How often each fault is done; where chance has a part, more than once even so."""

FILES = {campaign: file for file, campaign in CAMPAIGNS.values()}


class FaultRecord:
    """Of one run of pytest. `counts` are, by campaign, what was done how often ('cases', and what
    the campaign likes to tell) and what went wrong ('failed', 'skipped', and by kind)."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.wanted: Counter[str] = Counter()
        """Cases that a whole campaign has; who runs fewer has missed the bar."""
        self._figures: dict[str, dict[str, Figure]] = {}

    def tally(self, campaign: str) -> Counter[str]:
        return self.counts.setdefault(campaign, Counter())

    def add(self, campaign: str, *figures: Figure) -> None:
        """Of what is not a count. One whose metric was added before takes its place."""
        self._figures.setdefault(campaign, {}).update({one.metric: one for one in figures})

    def figures(self, campaign: str) -> list[Figure]:
        """All of them, those first that must be 0."""
        tally, cases = self.tally(campaign), self.tally(campaign)["cases"]
        bars = {f"{campaign}: {name}": 0.0 for name in ("failed", "skipped", *KINDS, OTHER)}
        told = {f"{campaign}: {name}": number for name, number in sorted(tally.items())}
        name = f"{campaign}: cases"
        return [
            Figure(name, cases, "cases", self.wanted[campaign], "higher", 1, 0.0),
            *(Figure(zero, told.get(zero, 0), "cases", bar, "lower", cases, 0.0)
              for zero, bar in bars.items()),
            *(Figure(more, told[more], "", None, "higher", 1, 0.0)
              for more in told if more not in bars and more != name),
            *self._figures.get(campaign, {}).values(),
        ]  # fmt: skip

    def write(self, directory: Path, command: str) -> list[Path]:
        """A file for each that a campaign of this run belongs to; what was there is gone."""
        by_file: dict[str, list[Figure]] = {}
        for campaign, tally in self.counts.items():
            if tally["cases"]:
                by_file.setdefault(FILES[campaign], []).extend(self.figures(campaign))
        written = [directory / f"{file}.json" for file in by_file]
        for path, figures in zip(written, by_file.values(), strict=True):
            write_figures(path, figures, command, describe_machine("cpu"))
        return written
