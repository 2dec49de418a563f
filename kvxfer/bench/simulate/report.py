"""What a run of the model came to: times and rates, and how busy everything was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.bench.report import Figure
from kvxfer.bench.serving.metrics import Answer, Summary, Wanted, summarise
from kvxfer.bench.serving.results import RATES, Better, unit
from kvxfer.bench.simulate.request import Request, State

if TYPE_CHECKING:
    from kvxfer.bench.simulate.cluster import Cluster
    from kvxfer.bench.simulate.links import Link
    from kvxfer.bench.simulate.servers import Server

PERCENTILES = (50.0, 90.0, 99.0)
METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Use:
    """Of one kind of resource, as shares of what there is: over the time of a run."""

    name: str
    mean: float
    most: float
    """Of the one that had most to do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    summary: Summary
    uses: tuple[Use, ...]
    counts: dict[str, int]
    """Requests by how they ended, and events that tell of want."""
    took_s: float
    """Of the model's time."""

    @property
    def num_refused(self) -> int:
        return sum(count for name, count in self.counts.items() if "refused" in name)

    @property
    def binding(self) -> Use:
        """What is busiest: it is what more load would wait for."""
        return max(self.uses, key=lambda one: one.mean)


def outcome(
    cluster: Cluster, requests: Sequence[Request], limits_ms: Mapping[str, float]
) -> Outcome:
    """Of a cluster that has run."""
    answers = [_answer(one) for one in requests]
    wanted = Wanted(METRICS, PERCENTILES, limits_ms, tells_late=False)
    summary = summarise(answers, 0.0, wanted)
    told = {key: value for key, value in summary.items() if key[0] != "itl"}  # first and last only
    counts: Counter[str] = Counter()
    counts["requests that came whole"] = sum(one.state is State.ENDED for one in requests)
    for one in requests:
        if one.why:
            counts[f"requests refused, {one.why}"] += 1
    counts["preemptions"] = sum(one.num_preempted for one in requests)
    caches = [one.cache for side in (cluster.prefills, cluster.decodes) for one in side]
    counts["growths of caches"] = sum(one.num_growths for one in caches)
    counts["decode steps"] = sum(one.num_steps for one in cluster.decodes)
    return Outcome(told, tuple(_uses(cluster)), dict(counts), cluster.env.now)


def _answer(request: Request) -> Answer:
    """As a client has it, but for the times of the tokens between the first and the last."""
    answer = Answer(request.num_input, request.num_output, request.due_s, request.sent_s)
    answer.token_s = [request.first_s, request.last_s]
    answer.num_output = request.num_output
    answer.failure = request.why
    return answer


def _uses(cluster: Cluster) -> list[Use]:
    now_s, shape = cluster.env.now or 1.0, cluster.shape
    prefills, decodes = cluster.prefills, cluster.decodes

    def servers(name: str, found: Sequence[Server]) -> Use:
        return _use(name, [one.work_s / now_s for one in found])

    def links(name: str, found: Sequence[Link]) -> Use:
        return _use(name, [one.busy_s / now_s for one in found])

    batches = [one.mean_batch() / shape.max_num_seqs for one in decodes]
    found = [
        servers("router", cluster.fronts),
        servers("prefill: control thread", [one.control for one in prefills]),
        servers("prefill: model", [one.model for one in prefills]),
        _use("prefill: cache", [one.cache.mean_use() for one in prefills]),
        links("links out of prefill", cluster.links.egress),
        links("links into decode", cluster.links.ingress),
        servers("decode: control thread", [one.control for one in decodes]),
        _use("decode: model, in full batches", [one.full_s / now_s for one in decodes]),
        _use("decode: room in the batch", batches),
        _use("decode: cache", [one.cache.mean_use() for one in decodes]),
    ]
    if shape.fabric_bytes_per_s:
        found.append(links("fabric", [cluster.links.fabric]))
    if cluster.cores is not None:
        share = cluster.cores.busy_s / now_s / shape.cores
        found.append(Use("cores", share, share))
    return found


def _use(name: str, shares: Sequence[float]) -> Use:
    kept = [min(1.0, one) for one in shares]
    return Use(name, math.fsum(kept) / len(kept), max(kept))


def figures(found: Outcome, head: str) -> list[Figure]:
    """`head` says which cluster."""
    rows: list[Figure] = []
    for (name, what), value in found.summary.items():
        if what in ("std", "p50"):
            continue
        better: Better = "higher" if name in RATES else "lower"
        metric = f"{head}: {name}, {what}"
        rows.append(Figure(metric, value, unit(name, what), None, better, 1, 0.0))
    for use in found.uses:
        metric = f"{head}: use of {use.name}"
        rows.append(Figure(metric, use.mean, "ratio", None, "lower", 1, 0.0))
    for name, count in found.counts.items():
        rows.append(Figure(f"{head}: {name}", count, "", None, "lower", 1, 0.0))
    return rows
