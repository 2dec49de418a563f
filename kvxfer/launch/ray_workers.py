"""Workers on a cluster: how they are made, where their room is, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvxfer.launch.ray_logs import CollectedLog
from kvxfer.launch.ray_seam import Bundle, Group, Host, Order
from kvxfer.launch.supervisor import WorkerPlan, WorkerState


class Members(Protocol):
    """Who is told of workers: a router."""

    def join(self, address: str, role: str) -> None:
        """Raises UsageError for an address that it may not dial."""

    def leave(self, address: str) -> None:
        """It is gone; also if it is not known."""

    def drain(self, address: str) -> None:
        """It shall finish what it has, and end; also if it is not known."""


@dataclass(frozen=True)
class Recipe:
    """How workers are made. `order` gets a role and how many workers there were before."""

    order: Callable[[str, int], Order]
    bundles: Mapping[str, Bundle]
    """By role."""
    log_dir: Path
    placement_timeout_s: float
    drain_timeout_s: float
    """For a worker that was told to leave."""
    is_json: bool = False
    """Of their logs."""


@dataclass(eq=False)
class Room:
    """A group of bundles, of which some are in use."""

    group: Group
    bundles: tuple[Bundle, ...]
    late_s: float
    """When it has to be placed at the latest."""
    is_placed: bool = False
    used: set[int] = field(default_factory=set)


@dataclass(eq=False)
class RayWorker:
    """A worker through all its processes, on whichever nodes."""

    plan: WorkerPlan
    order: Order
    room: Room
    index: int
    """Of its bundle in `room`."""
    log: CollectedLog
    host: Host | None = None
    state: WorkerState = WorkerState.STARTING
    is_leaving: bool = False
    pid: int = 0
    """On its node; 0 where there is none now."""
    address: str = ""
    """Under which a router knows it; '' where none does."""
    num_restarts: int = 0
    num_failures: int = 0
    """In a row."""
    last_end: str = ""
    due_s: float = 0.0
    """WAITING: when to start it again; READY: when its failures are forgotten; if it is leaving:
    when it is ended."""
