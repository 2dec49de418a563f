"""`kvxfer bench namespaces`: a hand-over between two hosts, here two network namespaces joined by
a link of limited rate, with every byte checked.

First the link: bare caches and the NIXL connector, push and pull in turn with plain TCP of as many
bytes over the same link. Then the hand-over as a user sees it (`kvxfer.bench.namespaces_workers`).
Needs root. The namespaces end with this command, however it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.bench.netns import Namespaces, why_not
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import describe_machine
from kvxfer.errors import KvxferError, UsageError
from kvxfer.transfer.connector import Direction

LEAST = {"mbit": 1, "mib": 2, "runs": 1, "warm_up": 0, "prompt_tokens": 1}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesOptions:
    """What `kvxfer bench namespaces` may be told."""

    mbit: int = 1000
    """Mbit/s of the link, each way, headers and all."""
    mib: int = 64
    """MiB that a transfer between bare caches moves."""
    runs: int = 5
    """Of each kind that are measured."""
    warm_up: int = 1
    """Of each kind before, which are not."""
    prompt_tokens: int = 512
    """Of the prompts that workers hand over, 128 KiB of KV each."""
    json: Path | None = None
    """Keep the figures in this file, from the first ones on."""


def run_namespaces(options: NamespacesOptions) -> int:
    """Measure, print, write; 1 when a bar was missed. Raises KvxferError."""
    from kvxfer.bench.namespaces_link import link_figures
    from kvxfer.bench.namespaces_workers import exposed_times

    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise UsageError(name, getattr(options, name), f"must be at least {least}")
    reason = why_not()
    if reason:
        raise KvxferError(f"no network namespaces here: {reason}")
    record = Record(options.json, command_line("namespaces", options))
    record.machine = f"{describe_machine('cpu')}, veth at {options.mbit} Mbit/s"
    with Namespaces() as namespaces:
        namespaces.shape(options.mbit)
        record.add(*link_figures(namespaces, options))
        for direction in Direction:
            record.add(*exposed_times(namespaces, options, direction))
    return record.exit_code
