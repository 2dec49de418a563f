"""A plan in bytes, for the process of another rank of the same worker."""

from __future__ import annotations

import msgspec
import numpy as np

from kvxfer.transfer.boxes import Box
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.rank_plans import RankMove
from kvxfer.transfer.regions import Int64Array


class BoxParts(msgspec.Struct, array_like=True, frozen=True):
    src_starts: bytes
    dst_starts: bytes
    extents: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    run_bytes: int


class MoveParts(msgspec.Struct, array_like=True, frozen=True):
    """A move whose runs follow from its boxes and edges."""

    src_rank: int
    dst_rank: int
    boxes: tuple[BoxParts, ...]
    src_edges: bytes
    dst_edges: bytes

    @classmethod
    def of(cls, move: RankMove) -> MoveParts:
        plan = move.plan
        boxes = tuple(
            BoxParts(
                box.src_starts.tobytes(),
                box.dst_starts.tobytes(),
                box.extents,
                box.src_strides,
                box.dst_strides,
                box.run_bytes,
            )
            for box in plan.boxes
        )
        edges = plan.src_edges.tobytes(), plan.dst_edges.tobytes()
        return cls(move.src_rank, move.dst_rank, boxes, *edges)

    def move(self) -> RankMove:
        """Raises PlanError where columns do not fit each other."""
        boxes = tuple(
            Box(
                _column(box.src_starts),
                _column(box.dst_starts),
                box.extents,
                box.src_strides,
                box.dst_strides,
                box.run_bytes,
            )
            for box in self.boxes
        )
        plan = TransferPlan(boxes, _column(self.src_edges), _column(self.dst_edges))
        return RankMove(self.src_rank, self.dst_rank, plan)


def _column(data: bytes) -> Int64Array:
    return np.frombuffer(data, dtype=np.int64).copy()
