"""What a round came to, from what its clients saw. Pure. Definitions are vLLM's:

| metric | of       | ms                                                               |
| ---    | ---      | ---                                                              |
| ttft   | request  | sent, until its first token is here                              |
| tpot   | request  | from there to its last token, by the tokens after the first      |
| itl    | event    | between two events of an answer that bring tokens                |
| e2el   | request  | sent, until its last token is here                               |

Requests of one token have no tpot. Rates are by the seconds from a round's start to the end of its
last request that came whole. Only requests that came whole are in times and rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvxfer.bench.serving.options import METRICS


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are monotonic seconds."""

    num_input: int
    num_asked: int
    """Tokens that were asked for."""
    due_s: float = 0.0
    """When it was to be sent."""
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """When each event came that brought tokens."""
    num_output: int = 0
    """Tokens, as its usage says."""
    num_prompt: int = 0
    """The prompt's, as its usage says."""
    tokens: list[int] = field(default_factory=list)
    """Where the service tells them."""
    kv_digests: list[str] = field(default_factory=list)
    request_id: str = ""
    num_limited: int = 0
    """Times that it was answered 429."""
    failure: str = ""
    """The kind, as in 'HTTP 500'; '' for one that came whole."""
    detail: str = ""
    """What was said of it."""

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.token_s[0] - self.sent_s)

    @property
    def e2el_ms(self) -> float:
        return 1e3 * (self.token_s[-1] - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        return (
            (self.e2el_ms - self.ttft_ms) / (self.num_output - 1) if self.num_output > 1 else None
        )

    @property
    def itl_ms(self) -> list[float]:
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [1e3 * (after - before) for before, after in pairs]

    def keeps(self, limits_ms: Mapping[str, float]) -> bool:
        """Whether it is within all of them. One without a tpot keeps any."""
        times = {"ttft": self.ttft_ms, "tpot": self.tpot_ms or 0.0, "e2el": self.e2el_ms}
        return all(times[name] <= limit for name, limit in limits_ms.items())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is told of a round."""

    metrics: Sequence[str]
    """Those with percentiles."""
    percentiles: Sequence[float]
    limits_ms: Mapping[str, float]
    tells_late: bool
    """Whether how late requests were sent says something: nothing but their time held them up."""


def failures(answers: Sequence[Answer]) -> Counter[str]:
    """By kind."""
    return Counter(one.failure for one in answers if one.failure)


def samples_ms(answers: Sequence[Answer], metric: str) -> list[float]:
    """Of the requests that came whole."""
    whole = [one for one in answers if not one.failure]
    match metric:
        case "ttft":
            return [one.ttft_ms for one in whole]
        case "tpot":
            return [one.tpot_ms for one in whole if one.tpot_ms is not None]
        case "itl":
            return [gap for one in whole for gap in one.itl_ms]
        case _:
            return [one.e2el_ms for one in whole]


Summary = dict[tuple[str, str], float]
"""By (metric, statistic), such as ('ttft', 'p99'): ms, or a second."""


def summarise(answers: Sequence[Answer], began_s: float, wanted: Wanted) -> Summary:
    """What has no sample is left out."""
    found: Summary = {}
    for name in METRICS:
        samples = np.asarray(samples_ms(answers, name))
        if not samples.size:
            continue
        found[name, "mean"] = float(samples.mean())
        found[name, "median"] = float(np.median(samples))
        found[name, "std"] = float(samples.std())
        if name in wanted.metrics:
            for percentile in wanted.percentiles:
                found[name, f"p{percentile:g}"] = float(np.percentile(samples, percentile))
    whole = [one for one in answers if not one.failure]
    if whole:
        found |= _rates(whole, max(one.token_s[-1] for one in whole) - began_s, wanted)
    late = [one.sent_s - one.due_s for one in answers if one.sent_s]
    if late and wanted.tells_late:
        found["sent late", "p99"] = 1e3 * float(np.percentile(late, 99))
    return found


def _rates(whole: Sequence[Answer], took_s: float, wanted: Wanted) -> Summary:
    num_output = sum(one.num_output for one in whole)
    num_input = sum(one.num_prompt or one.num_input for one in whole)
    found: Summary = {
        ("throughput", "requests"): len(whole) / took_s,
        ("throughput", "output tokens"): num_output / took_s,
        ("throughput", "all tokens"): (num_input + num_output) / took_s,
    }
    if wanted.limits_ms:
        good = sum(one.keeps(wanted.limits_ms) for one in whole)
        found["goodput", "requests"] = good / took_s
    return found
