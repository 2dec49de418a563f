"""The router's choice in the model: what it knows of each worker, and what choosing costs it.

It knows what it gave to whom, as the real one does; what the real one has from a Status of up to
half a second ago (free blocks, rates), this one knows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.decode import DecodeWorker
from kvxfer.bench.simulate.pairing import Choice, choose
from kvxfer.bench.simulate.prefill import PrefillWorker
from kvxfer.bench.simulate.request import Request
from kvxfer.bench.simulate.shape import ClusterShape
from kvxfer.serve.pairing import BLOCKS_WAIT_S


class Placement:
    """Reads the workers, and writes a request's pair."""

    def __init__(
        self,
        shape: ClusterShape,
        costs: Costs,
        prefills: Sequence[PrefillWorker],
        decodes: Sequence[DecodeWorker],
        chance: np.random.Generator,
    ) -> None:
        self._shape = shape
        self._costs = costs
        self._prefills = prefills
        self._decodes = decodes
        self._chance = chance
        self._queued = np.zeros(len(prefills))
        """Tokens that were given to each prefill worker and are not computed."""
        self._there = np.zeros(len(decodes))
        """Requests that were given to each decode worker and have not ended."""
        self._at_prefill = np.zeros(len(decodes))
        """Of those, the ones whose prompts are not computed."""

    def why_not(self, request: Request) -> str:
        """Why it is refused, or ''."""
        shape = self._shape
        most = min(shape.prefill_blocks, shape.decode_blocks) * shape.block_size
        if request.most_tokens > most:
            return "too long"
        is_full = self._at_prefill.min() >= shape.max_num_queued
        return "overloaded" if is_full else ""

    def place(self, request: Request) -> Choice:
        choice = choose(*self._sides(request), self._moves_s(request), self._chance)
        request.prefill, request.decode = choice.prefill, choice.decode
        self._queued[choice.prefill] += request.num_input
        self._there[choice.decode] += 1
        self._at_prefill[choice.decode] += 1
        return choice

    def work_s(self, choice: Choice, num_under_way: float) -> float:
        """The router's, for a choice."""
        costs, shape = self._costs, self._shape
        num_workers = shape.prefill + shape.decode
        each_s = costs.place_worker_s + costs.place_flight_s * num_under_way
        return costs.place_s + num_workers * each_s + costs.place_pair_s * choice.num_seen

    def computed(self, request: Request) -> None:
        """Its first token is known."""
        if request.told == 1:
            self._queued[request.prefill] -= request.num_input
            self._at_prefill[request.decode] -= 1

    def ended(self, request: Request) -> None:
        self._there[request.decode] -= 1

    def _sides(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each worker of either role."""
        costs, shape = self._costs, self._shape
        rate = shape.chunk_tokens / costs.chunk_s(shape.chunk_tokens, 0)
        prefill_s = (self._queued + request.num_input) / rate
        paces = np.fromiter((one.pace for one in self._decodes), float, len(self._decodes))
        told = paces[paces > 0]
        paces[paces == 0] = told.mean() if told.size else 1 / costs.step_s(1, 0)
        decode_s = request.num_output * self._there / paces
        size = shape.block_size
        for workers, seconds, tokens in (
            (self._prefills, prefill_s, request.num_input),
            (self._decodes, decode_s, request.num_input + request.num_output),
        ):
            room = (one.cache.shape.capacity - one.cache.used for one in workers)
            lacks = np.fromiter(room, float, len(workers)) < -(-tokens // size)
            seconds[lacks] += BLOCKS_WAIT_S
        return prefill_s, decode_s

    def _moves_s(self, request: Request) -> float:
        return request.num_input * self._costs.kv_token_bytes / self._costs.lane_bytes_per_s
