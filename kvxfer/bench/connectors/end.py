"""One of the two processes between which `kvxfer bench connectors` moves KV."""

from __future__ import annotations

import time

import torch

from kvxfer.bench.connectors.moves import Aim, Timed
from kvxfer.bench.connectors.stream import Receiver, send_stream
from kvxfer.bench.transfer_end import End
from kvxfer.bench.transfer_fill import clear, fill, is_filled
from kvxfer.bench.transfer_words import OTHER, CacheSetup, Move
from kvxfer.cache.budget import open_files_needed
from kvxfer.errors import TransferError
from kvxfer.memory.chunks import LARGEST_CHUNK
from kvxfer.memory.limits import ensure_open_files
from kvxfer.transfer.plan import TransferPlan

SPINS = 200
"""Polls in a row without a pause, a millisecond or two: a pause takes 100 µs, as long as a small
transfer. On the host, whoever copies for longer gets the core after that."""


class ConnectorsEnd(End):
    """Moves what it was aimed at, and takes the time of each part."""

    def __init__(self, role: str, device: str) -> None:
        super().__init__(role, device)
        self._aim: Aim | None = None
        self._wants_runs = False
        """Whether the connector that is open asks plans for their runs, as the last one showed."""
        self._spins = 0
        self._receiver: Receiver | None = None

    @property
    def aimed(self) -> Aim:
        if self._aim is None:
            raise TransferError(f"{self.role} was aimed at nothing")
        return self._aim

    def open_chunked(self, setup: CacheSetup, chunk_bytes: int) -> None:
        """As `open_cache`, in chunks no larger than `chunk_bytes`."""
        blocks = setup.committed
        self.open_cache(CacheSetup(setup.shapes, setup.capacity, (0,) * len(blocks), setup.fixed))
        if self.device == "cpu" and chunk_bytes < LARGEST_CHUNK:
            groups = self.cache.geometry.groups
            counts = zip(groups, blocks, strict=True)
            ensure_open_files(sum(open_files_needed(g, n, chunk_bytes) for g, n in counts))
        self.cache.buffer.largest_chunk_bytes = chunk_bytes
        self.cache.extend(blocks)

    def aim(self, aim: Aim) -> None:
        """At this from now on; the source writes what is to move."""
        self._aim = aim
        self._wants_runs = False
        if self.role == "source":
            fill(self._views(), aim.src_blocks, aim.seed)
            self._settle()

    def wipe(self) -> None:
        """Have nothing in the target's blocks of what is to come."""
        clear(self._views(), self.aimed.dst_blocks)
        self._settle()

    def verify(self) -> bool:
        """Whether every byte that was to move is what the source wrote."""
        return is_filled(self._views(), self.aimed.dst_blocks, self.aimed.seed)

    def timed(self) -> Timed:
        """Plan and move once. Raises ConnectorError, DeadlineExceeded."""
        aim, connector = self.aimed, self.connector
        start = time.perf_counter()
        plan = self.plan_of(Move(aim.direction, aim.src_blocks, aim.dst_blocks))
        if self._wants_runs:
            _ = plan.runs
        prepared = time.perf_counter()
        ticket = connector.submit(OTHER[self.role], aim.direction, plan)
        posted = time.perf_counter()
        self._spins = 0
        self.finish(ticket)
        ended = time.perf_counter()
        self._wants_runs = _has_runs(plan)
        descriptors = plan.num_runs if self._wants_runs else len(plan.boxes)
        return Timed(
            prepared - start, posted - prepared, ended - posted, plan.total_bytes, descriptors
        )

    def pause(self) -> None:
        self._spins += 1
        if self._spins < SPINS:
            time.sleep(0)
        else:
            super().pause()

    def stream_open(self, host: str) -> int:
        """Receive plain TCP at `host`; returns the port."""
        self._stop_receiving()
        self._receiver = Receiver(host)
        return self._receiver.port

    def stream_send(self, host: str, port: int, size_bytes: int) -> float:
        """Seconds until the other end's word that it has all."""
        return send_stream(host, port, size_bytes)

    def close(self) -> None:
        self._aim = None
        self._stop_receiving()
        super().close()

    def _stop_receiving(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _views(self) -> list[torch.Tensor]:
        """Of the heads that move."""
        return [view[:, : self.aimed.num_heads] for view in self.cache.views[0]]


def _has_runs(plan: TransferPlan) -> bool:
    """Whether somebody asked for them: they are made then, and kept."""
    return plan.given is not None or "runs" in vars(plan)
