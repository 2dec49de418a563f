"""Costs from what was observed. Pure.

Each is the least-squares fit of a sum of costs, none below 0, to times of a load in which that sum
is all there is:

| costs            | from                                                                         |
| ---              | ---                                                                          |
| prefill_*        | requests one by one: asked of prefill, to the end of its computing           |
| front_*, client_*| CPU time of the two processes, over all loads                                |
| front_request_s  | requests one by one: sent, to accepted by decode, less the client's part     |
| *_control_s      | accepted by decode, to asked of prefill: half a hand-over's work of each     |
| lane_*           | the transfers; the end of computing, to the proof, less that work            |
| first_token_s    | the end of computing, to the first token, less the router's and client's     |
| decode_*         | tokens' distances, of bursts while no prompt is computed, and one by one     |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import mean, median

import numpy as np

from kvxfer.bench.serving.metrics import Answer
from kvxfer.bench.simulate.real import Observed
from kvxfer.errors import KvxferError

SAME_READ_S = 0.002
"""Tokens that came so near to one another were told together."""
MARGIN_S = 0.05
"""After the last prompt of a burst was computed, until all decode."""
LEAST_STEPS = 10
"""Of a sequence, for its mean to say something."""


def fit_sum(rows: Sequence[Sequence[float]], totals: Sequence[float]) -> list[float]:
    """Costs whose sums by `rows` (how often each is in it) are nearest to `totals`, relative to
    these; none is below 0. Of all subsets of costs that are not 0 the best: there are few."""
    matrix, wanted = np.asarray(rows, float), np.asarray(totals, float)
    weights = 1 / np.maximum(wanted, 1e-9)
    matrix, wanted = matrix * weights[:, None], wanted * weights
    best, found = np.inf, np.zeros(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), size):
            part = matrix[:, columns]
            costs, *_ = np.linalg.lstsq(part, wanted, rcond=None)
            error = float(np.sum((part @ costs - wanted) ** 2))
            if (costs >= 0).all() and error < best - 1e-15:
                best, found = error, np.zeros(matrix.shape[1])
                found[list(columns)] = costs
    return [float(one) for one in found]


def fit_prefill(alone: Observed, chunk_tokens: int) -> dict[str, float]:
    """Of requests that came one by one."""
    rows, totals = [], []
    for answer in alone.answers:
        starts = range(0, answer.num_input, chunk_tokens)
        sizes = [min(chunk_tokens, answer.num_input - start) for start in starts]
        behind = sum(start * size for start, size in zip(starts, sizes, strict=True))
        rows.append((len(sizes), answer.num_input, behind))
        totals.append(alone.at_s(answer, "computed") - alone.at_s(answer, "requested"))
    names = ("prefill_chunk_s", "prefill_token_s", "prefill_context_s")
    return dict(zip(names, fit_sum(rows, totals), strict=True))


def fit_processes(loads: Sequence[Observed]) -> dict[str, float]:
    """CPU of the router and of the client. What they take while nothing happens is left out."""
    rows = [(len(one.answers), _deliveries(one), _tokens(one), one.took_s) for one in loads]
    front = fit_sum(rows, [one.front_cpu_s for one in loads])
    client = fit_sum(rows, [one.client_cpu_s for one in loads])
    return {
        "front_delivery_s": front[1],
        "front_token_s": front[2],
        "client_request_s": client[0],
        "client_delivery_s": client[1],
        "client_token_s": client[2],
    }


def fit_ways(alone: Observed, known: dict[str, float]) -> dict[str, float]:
    """What is between the stages, of requests one by one. `known`: as `fit_processes` found."""
    answers, at_s = alone.answers, alone.at_s
    grant_s = median(at_s(one, "requested") - at_s(one, "accepted") for one in answers)
    arrive = [at_s(one, "accepted") - one.sent_s for one in answers]
    fixed_s, prompt_token_s = fit_sum([(1, one.num_input) for one in answers], arrive)
    tells = ("front_delivery_s", "front_token_s", "client_delivery_s", "client_token_s")
    first_s = median(one.token_s[0] - at_s(one, "computed") for one in answers)
    return {
        "prefill_control_s": 2 * grant_s,
        "decode_control_s": 2 * grant_s,
        "front_request_s": max(0.0, fixed_s - known["client_request_s"] - grant_s),
        "front_prompt_token_s": prompt_token_s,
        "first_token_s": max(0.0, first_s - sum(known[name] for name in tells)),
    }


def fit_lane(alone: Observed, chunk_tokens: int, grant_s: float) -> dict[str, float]:
    """`grant_s`: half a hand-over's work of one control thread."""
    moved = [
        (one.num_bytes, (one.end_ns - one.start_ns) / 1e9)
        for answer in alone.answers
        for one in alone.events[answer.request_id]
        if one.event == "transfer_end" and one.end_ns > one.start_ns and one.num_bytes
    ]
    if not moved:
        raise KvxferError(f"{alone.name}: the workers' traces do not tell of transfers")
    rate = max(num_bytes / took_s for num_bytes, took_s in moved)
    tokens = sum(one.num_input for one in alone.answers)
    token_bytes = sum(num_bytes for num_bytes, _ in moved) / tokens
    rests = []
    for answer in alone.answers:
        last = (answer.num_input - 1) % chunk_tokens + 1
        took_s = alone.at_s(answer, "filled") - alone.at_s(answer, "computed")
        rests.append(took_s - 2 * grant_s - last * token_bytes / rate)
    return {
        "lane_s": max(0.0, median(rests)),
        "lane_bytes_per_s": rate,
        "kv_token_bytes": token_bytes,
    }


def fit_decode(alone: Observed, bursts: Sequence[Observed]) -> dict[str, float]:
    """A row for each sequence: how many decoded, and the KV that all of them had."""
    rows, totals = [], []
    for answer in alone.answers:
        rows.append((1.0, 1.0, answer.num_input + answer.num_output / 2))
        totals.append(mean(answer.itl_ms) / 1e3)
    for load in bursts:
        begins_s = max(load.at_s(one, "computed") for one in load.answers) + MARGIN_S
        ends_s = min(one.token_s[-1] for one in load.answers)
        for answer in load.answers:
            seen = [at for at in answer.token_s if begins_s <= at <= ends_s]
            if len(seen) > LEAST_STEPS:
                context = sum(_context(one, seen) for one in load.answers)
                rows.append((1.0, float(len(load.answers)), context))
                totals.append((seen[-1] - seen[0]) / (len(seen) - 1))
    names = ("decode_step_s", "decode_sequence_s", "decode_context_s")
    return dict(zip(names, fit_sum(rows, totals), strict=True))


def _context(answer: Answer, seen: Sequence[float]) -> float:
    """KV tokens that it had in the middle of those steps."""
    middle_s = (seen[0] + seen[-1]) / 2
    return answer.num_input + sum(at <= middle_s for at in answer.token_s)


def _tokens(load: Observed) -> int:
    return sum(one.num_output for one in load.answers)


def _deliveries(load: Observed) -> int:
    times = np.sort(np.concatenate([one.token_s for one in load.answers]))
    return 1 + int(np.sum(np.diff(times) > SAME_READ_S))
