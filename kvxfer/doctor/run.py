"""`kvxfer doctor`: all sections at once, as a table or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from kvxfer.doctor.connectors import connector_checks, loopback_checks
from kvxfer.doctor.devices import devices
from kvxfer.doctor.machine import machine
from kvxfer.doctor.network import network_checks
from kvxfer.doctor.packages import packages
from kvxfer.doctor.ports import port_checks
from kvxfer.doctor.screen import show
from kvxfer.errors import KvxferError
from kvxfer.telemetry.checks import Check

Section = Callable[[], list[Check]]

SECTIONS: Mapping[str, tuple[Section, ...]] = {
    "packages": (packages,),
    "machine": (machine,),
    "devices": (devices,),
    "network": (network_checks, port_checks),
    "connectors": (
        partial(connector_checks, "peer"),
        partial(connector_checks, "nixl"),
        partial(connector_checks, "mooncake"),
        loopback_checks,
    ),
}


def run_doctor(json: bool) -> int:
    """Exit code 1 if a check fails."""
    found = examine(SECTIONS)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    else:
        show(found)
    return exit_code(found)


def exit_code(found: Mapping[str, Iterable[Check]]) -> int:
    return int(any(check.status == "fail" for checks in found.values() for check in checks))


def examine(sections: Mapping[str, tuple[Section, ...]]) -> dict[str, list[Check]]:
    """The checks of all sections, which are looked at side by side."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        asked = {
            name: [pool.submit(_examine_one, name, part) for part in parts]
            for name, parts in sections.items()
        }
        return {
            name: [check for one in parts for check in one.result()]
            for name, parts in asked.items()
        }


def _examine_one(name: str, section: Section) -> list[Check]:
    """A section that cannot be looked at is a finding, too."""
    try:
        return section()
    except (KvxferError, OSError, ImportError, RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return [Check(name, "fail", text, "kvxfer cannot look at this part of the machine")]
