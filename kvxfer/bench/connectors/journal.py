"""What a run has found so far, on disk from the first row on."""

from __future__ import annotations

import csv
from pathlib import Path

from kvxfer.bench.connectors.ceilings import Ceilings
from kvxfer.bench.connectors.columns import COLUMNS
from kvxfer.bench.connectors.report import Report, Row
from kvxfer.bench.connectors.sweep import Sweep
from kvxfer.bench.report import measured_commit, versions
from kvxfer.errors import UsageError


class Journal:
    """The rows of one run. Files are written anew with each, so that a run which is cut short, in
    whatever way, leaves what it had found, marked as incomplete."""

    def __init__(
        self,
        command: str,
        machine: str,
        sweep: Sweep,
        ceilings: Ceilings,
        files: tuple[Path | None, Path | None],
    ) -> None:
        """`files`: of the report, and of the rows as CSV."""
        self._command = command
        self._sweep = sweep
        self._ceilings = ceilings
        self._json, self._csv = files
        self.machine = machine
        self.rows: list[Row] = []
        self.problems = list(sweep.problems)
        self.is_whole = True
        """Whether nothing that was to be measured went wrong so far."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.is_whole = self.is_whole and not row.problem
        self.write(is_complete=False)

    def report(self, *, is_complete: bool) -> Report:
        return Report(
            machine=self.machine,
            versions=versions(),
            commit=measured_commit(),
            command=self._command,
            settings=self._sweep.settings,
            ceilings=self._ceilings.all,
            rows=self.rows,
            is_complete=is_complete,
            problems=self.problems,
        )

    def write(self, *, is_complete: bool) -> None:
        if self._json is not None:
            self.report(is_complete=is_complete).write(self._json)
        if self._csv is not None:
            write_csv(self.rows, self._csv)


def write_csv(rows: list[Row], path: Path) -> None:
    """In one go, as a report."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(column.key for column in COLUMNS)
        writer.writerows([column.value(row) for column in COLUMNS] for row in rows)
    draft.replace(path)


def check_files(**paths: Path | None) -> None:
    """Raise UsageError for a file, by option, that cannot be written."""
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(option, str(path), "is a directory")
        if not path.parent.is_dir():
            raise UsageError(option, str(path), f"{path.parent} is no directory")
