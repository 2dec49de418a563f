"""`python -m kvxfer.bench.scale_agents`: the agents of the peers of `kvxfer bench scale`.

In a process of their own, so that what a transport does in the background holds up nobody's mail:
making one connection was measured to hold a poll for 13 ms (NIXL, 2 busy cores).
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from kvxfer.command import run_command
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import Direction, MemoryWindow, load_connectors
from kvxfer.transfer.multi import MultiConnector
from kvxfer.transfer.regions import Region
from kvxfer.worker.process import Announcer, end_with_parent, handle_signals

PAUSE_S = 0.02
"""Between two polls of an agent, as a worker's transfer thread that has nothing to do."""


class Agents(msgspec.Struct, frozen=True):
    """What peers tell of their memory, which is one and the same."""

    incarnation: str
    ranks: list[RankFacts]
    """Of each peer its only one."""
    regions: list[Region]

    def facts(self, worker: WorkerFacts) -> list[WorkerFacts]:
        """Of decode workers that fit a prefill `worker`: all else is as it is there."""
        return [
            msgspec.structs.replace(
                worker,
                role="decode",
                worker_id=_name(number),
                incarnation=self.incarnation,
                ranks=[rank],
                regions=self.regions,
                generation=1,
                epoch=0,
            )
            for number, rank in enumerate(self.ranks)
        ]


def read_agents(path: Path) -> Agents:
    return msgspec.json.decode(path.read_bytes(), type=Agents)


def _name(number: int) -> str:
    return f"decode-{number}"


def scale_agents(
    *,
    connector: str,
    count: int,
    incarnation: str,
    found: Path,
    ready_fd: Annotated[int, Parameter(show=False)],
) -> int:
    """Run the agents of `count` decode workers without anything else.

    Parameters
    ----------
    connector
        Names, separated by commas.
    count
        How many.
    incarnation
        Of all of them.
    found
        What describes them is written here.
    """
    end_with_parent()
    announcer = Announcer(ready_fd)
    is_over = threading.Event()
    with ExitStack() as undo, handle_signals(is_over.set):
        buffer = VirtualBuffer(HostDriver(), HostDriver().granularity)
        undo.callback(buffer.close)
        buffer.commit([(0, buffer.driver.granularity)])
        regions = [Region(chunk.offset, chunk.size) for chunk in buffer.chunks]
        window = MemoryWindow(buffer.base_address, buffer.driver.granularity, "cpu", buffer)
        types = load_connectors(connector)
        made: list[MultiConnector] = []
        for number in range(count):
            if is_over.is_set():
                return 0
            one = MultiConnector.open(
                types, f"{_name(number)}.{incarnation}", window, Direction.PULL
            )
            undo.callback(one.close)
            one.register(regions)
            made.append(one)
            announcer.step("an agent")
        ranks = [
            RankFacts(buffer.base_address, one.describe(regions), [one.invite()]) for one in made
        ]
        found.write_bytes(msgspec.json.encode(Agents(incarnation, ranks, regions)))
        announcer.ready()
        while not is_over.wait(PAUSE_S):
            for one in made:
                one.poll()
    return 0


if __name__ == "__main__":
    run_command(scale_agents, "python -m kvxfer.bench.scale_agents")
