"""What `kvxfer bench growth` measures: lanes, sizes, and the caches that those take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.bench.transfer_devices import why_no_connector
from kvxfer.bench.transfer_shapes import MIB, blocks_for, spec_of
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.errors import UsageError
from kvxfer.transfer.connector import Direction, check_connectors, load_connector
from kvxfer.transfer.lanes import Lane, offered

if TYPE_CHECKING:
    from kvxfer.bench.growth import GrowthOptions
    from kvxfer.memory.driver import VmmDriver

KNOWN = ("nixl", "peer", "staged", "mooncake")
"""Connectors between processes, measured where they are there."""
ROLES = {"source": "prefill", "target": "decode"}
SPEC = spec_of()
"""A block is 2 MiB; LBHNC has 32 segments."""
KEPT_BLOCK, PROBE_BLOCK, FIRST_BLOCK = 1, 2, 3
"""Of both ends: one that a shrink must leave alone, one to pair with new memory, and from where on
the transfers in flight have theirs."""
RING = 4
"""Sets of target blocks that transfers in flight take in turn: while one is compared the next ones
are written."""
USABLE_SHARE = 0.92
"""Of what is free, as the launcher divides it: the rest is for all else that runs here."""


@dataclass(frozen=True, slots=True)
class Case:
    """A lane, and the size of a growth."""

    lane: Lane
    size_mib: int
    devices: Mapping[str, str]
    """Of the source and of the target."""
    layout: str
    transfer_blocks: int

    @property
    def owner(self) -> str:
        """Who grows: the end that does not start transfers."""
        return "source" if self.lane.direction is Direction.PULL else "target"

    @property
    def mover(self) -> str:
        return "target" if self.owner == "source" else "source"

    @property
    def num_blocks(self) -> int:
        """That a growth adds."""
        return self.size_mib * MIB // SPEC.block_bytes

    def base_blocks(self, role: str) -> int:
        """What `role` has before the growth, the null block included."""
        sets = 1 if role == "source" else RING
        return FIRST_BLOCK + sets * self.transfer_blocks

    def capacity_blocks(self, role: str) -> int:
        """Both ends grow, one at a time."""
        return self.base_blocks(role) + self.num_blocks


def cases_of(
    options: GrowthOptions, devices: tuple[str, str], sizes: Sequence[int]
) -> tuple[list[Case], list[str]]:
    """Lane by lane, size by size, and why connectors that nobody asked for by name are left out.
    Raises UsageError."""
    layout = KVCacheLayout.parse("layout", options.layout)
    names, left_out = _connectors(options.connectors)
    lanes = offered({name: load_connector(name) for name in names}, options.lane)
    if not lanes:
        raise UsageError("lane", options.lane, f"none of {', '.join(names)} has such a lane")
    blocks = blocks_for(SPEC, options.transfer_mib * MIB)
    by_role = dict(zip(ROLES, devices, strict=True))
    cases = [Case(lane, size, by_role, layout.name, blocks) for lane in lanes for size in sizes]
    drivers = {device: _driver(device) for device in devices}
    for case in cases:
        _check_size(case, layout, drivers)
    return cases, left_out


def _connectors(asked: str) -> tuple[list[str], list[str]]:
    if asked:
        return check_connectors(asked), []
    reasons = {name: why_no_connector(name) for name in KNOWN}
    left_out = [f"{name}: not measured: {reason}" for name, reason in reasons.items() if reason]
    return [name for name in KNOWN if not reasons[name]], left_out


def _driver(device: str) -> VmmDriver:
    from kvxfer.worker.device import make_driver

    driver = make_driver(device)
    if isinstance(driver, str):
        raise UsageError("devices", device, driver)
    return driver


def _check_size(case: Case, layout: KVCacheLayout, drivers: Mapping[str, VmmDriver]) -> None:
    """Raise UsageError for a size that adds no memory, or more than there is."""
    if case.num_blocks < 1:
        least = f"is less than a block of {SPEC.block_bytes // MIB} MiB"
        raise UsageError("sizes", case.size_mib, least)
    base, added = dict.fromkeys(drivers, 0), dict.fromkeys(drivers, 0)
    for role, device in case.devices.items():
        most, driver = case.capacity_blocks(role), drivers[device]
        geometry = CacheGeometry.build([SPEC], [layout], [most], driver.granularity)
        small = geometry.committed_bytes([case.base_blocks(role)])
        more = geometry.committed_bytes([most]) - small
        if not more:
            step = geometry.groups[0].num_segments * driver.granularity // MIB
            reason = f"adds nothing to what granules of {device} back anyway: at least {step}"
            raise UsageError("sizes", case.size_mib, reason)
        base[device] += small
        added[device] = max(added[device], more)  # one grows at a time
    for device, driver in drivers.items():
        size = base[device] + added[device]
        free = int(driver.memory_info().free_bytes * USABLE_SHARE)
        if size > free:
            reason = f"needs {size // MIB} MiB of {device}, of which {free // MIB} can be had"
            raise UsageError("sizes", case.size_mib, reason)
