"""The worker of `kvxfer bench scale`: as in service but for the model, and for a note of each
growth's moments, which its peers' are compared with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvxfer.bench.growth_steps import Laps
from kvxfer.control.auth import Keys
from kvxfer.control.channel import Channel
from kvxfer.control.messages import Message, RegionsUpdate
from kvxfer.worker.process import Setting

if TYPE_CHECKING:
    from kvxfer.worker.assembly import StartEngine
    from kvxfer.worker.engine import Engine


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StampOptions:
    """Where the moments go."""

    stamps: Annotated[Path, Parameter(show=False)]
    """A file: an object a line, {generation, committed_s, first_send_s}, of CLOCK_MONOTONIC."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """One growth, as its owner saw it, in seconds of CLOCK_MONOTONIC."""

    committed_s: float
    """Its memory is there; it is registered and described after that."""
    first_send_s: float
    """The first peer is about to be told."""


def read_stamps(path: Path) -> dict[int, Stamp]:
    """By generation; a line that is not whole yet is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record.pop("generation"): Stamp(**record) for record in records}


class StampedChannel(Channel):
    """Notes when the first peer is told of each generation."""

    def __init__(
        self, identity: str, listen: str, keys: Keys | None, laps: Laps, stamps: Path
    ) -> None:
        """`laps` has the cache's extensions."""
        super().__init__(identity, listen, keys)
        self._laps = laps
        self._moments = stamps.open("a")
        self._newest = 0

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, RegionsUpdate) and message.generation > self._newest:
            self._newest = message.generation
            self._note(time.monotonic())
        super().send(peer, message)

    def _note(self, first_send_s: float) -> None:
        committed_s = max(lap.end_s for lap in self._laps.take())
        found = {"committed_s": committed_s, "first_send_s": first_send_s}
        self._moments.write(json.dumps({"generation": self._newest, **found}) + "\n")
        self._moments.flush()

    def close(self) -> None:
        super().close()
        self._moments.close()


def stamped(options: StampOptions) -> Setting:
    """What makes a worker without a model write stamps."""
    laps = Laps()

    def channel(identity: str, listen: str, keys: Keys | None) -> Channel:
        return StampedChannel(identity, listen, keys, laps, options.stamps)

    def load_start() -> StartEngine:
        from kvxfer.bench.null_engine import start_null_engine

        def start(*arguments: Any, **named: Mapping[str, Any]) -> Engine:
            engine = start_null_engine(*arguments, **named)  # type: ignore[arg-type]
            laps.listen_to_steps(engine.cache, "extending", "extend")
            return engine

        return start

    return Setting(channel, load_start)
