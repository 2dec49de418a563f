"""What placing workers on a Ray cluster takes, without Ray: words, contracts, and arithmetic.

`kvxfer.launch.ray` implements the contracts with Ray, `tests/support/ray_here.py` with processes of
this host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Bundle = Mapping[str, float]
"""Resources of one worker, under Ray's names: CPU, GPU, memory (bytes)."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster that is alive."""

    ip: str
    resources: Bundle
    """All of them, in use or not."""


@dataclass(frozen=True, slots=True)
class Order:
    """One worker process, for whichever node it is placed on."""

    name: str
    module: str
    arguments: tuple[str, ...]
    """All of its flags but --listen."""
    is_on_loopback: bool
    """It listens on loopback, else on its node's address; any free port."""
    environment: Mapping[str, str]
    """Besides that of the node."""
    without: frozenset[str]
    """Variables of the node that it shall not see."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a worker's host has seen of it since the last look."""

    ip: str
    pid: int
    address: str
    """Where it listens; '' before."""
    is_ready: bool
    steps: tuple[str, ...]
    log: bytes
    ending: str
    """Why it has ended; '' while it lives."""
    exit_code: int
    """Of the process, if it has ended."""


class Host(Protocol):
    """Runs one worker process somewhere. No call blocks."""

    @property
    def lost(self) -> str:
        """Why it is not there any more, '' while it is, or is on its way."""

    @property
    def is_faulty(self) -> bool:
        """It is lost because it could not do its work, as it would not elsewhere."""

    def take(self) -> list[Look]:
        """What it said since the last call, oldest first."""

    def stop(self) -> None:
        """End the process and the host: SIGTERM, a grace, SIGKILL. Idempotent."""


class Group(Protocol):
    """Bundles that are reserved together. No call blocks."""

    @property
    def is_placed(self) -> bool:
        """Whether all of them are."""

    @property
    def lacking(self) -> str:
        """While they are not: what the cluster has instead of what they want; '' if not known."""

    def start(self, index: int, order: Order, life: int) -> Host:
        """Run a worker in a bundle, for the `life`th time. Only once the group is placed."""

    def release(self) -> None:
        """Give the room back, as soon as the hosts in it, which were told to stop, have ended."""


class Cluster(Protocol):
    """One thread calls; no call blocks."""

    def reserve(self, bundles: Sequence[Bundle]) -> Group:
        """Have room made for workers, bundle by bundle."""

    def check(self) -> None:
        """Raise what made the cluster useless. Raises KvxferError."""


def missing_room(
    bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Node], free: Bundle
) -> str:
    """For a person: what was asked for, and what of it there is. Pure. `free` is of all nodes
    together."""
    kinds = sorted({name for one in bundles for name in one if not name.startswith("node:")})
    asked = [f"{_number(name, sum(one.get(name, 0.0) for one in bundles))} {name}"
             for name in kinds]  # fmt: skip
    most = [max((one.get(name, 0.0) for one in bundles), default=0.0) for name in kinds]
    each = " and ".join(f"{_number(name, n)} {name}" for name, n in zip(kinds, most, strict=True))
    there = [
        f"{name} {' + '.join(_number(name, node.resources.get(name, 0.0)) for node in nodes)} "
        f"({_number(name, free.get(name, 0.0))} free)"
        for name in kinds
    ]
    text = f"{len(bundles)} workers ({strategy}) want {', '.join(asked)}, up to {each} in one place"
    text += f"; the cluster's {len(nodes)} nodes have {', '.join(there)}"
    if strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        text += f", and STRICT_SPREAD wants {len(bundles)} nodes"
    return text


def _number(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:g}"
