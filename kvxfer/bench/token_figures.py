"""The figures of `kvxfer bench tokens` and `kvxfer bench beside`."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.bench.report import Figure
from kvxfer.bench.token_pair import PACED, SATURATED, Beside
from kvxfer.bench.token_rounds import Equality, Found
from kvxfer.bench.token_timeline import STEPS

ADDED_BAR_MS = 2.0
TIES = 0.021
"""Exact ties of the largest two logits, as a share of positions, that random bf16 models were seen
to have: where a device's bits depend on the batch, they decide for another token."""
PACED_BARS, SATURATED_BARS = (1.03, 1.03), (1.2, 1.1)
"""Of decode's inter-token p99, and of prefill's time."""
REACHED = 0.97
"""Of the pace: less was not measured as asked."""
ORDINALS = ("first", "second")
PREFILL = dict(STEPS)["computed"]


def figures_of(found: Found, prompt_tokens: int) -> Iterator[Figure]:
    """`found` holds at least one round."""
    rounds, prompt = found.rounds, f"a {prompt_tokens:,}-token prompt"
    for index, name in enumerate(ORDINALS):
        added = [one.added_ms[index] for one in rounds]
        metric = f"added time to the {name} token of {prompt}"
        yield Figure.of(metric, added, "ms", "lower", ADDED_BAR_MS)
    for index, name in enumerate(ORDINALS):
        single = [one.single_ms[index] for one in rounds]
        handed = [one.handed_ms[index] for one in rounds]
        yield Figure.of(f"time to the {name} token: single process", single, "ms", "lower")
        yield Figure.of(f"time to the {name} token: handed over", handed, "ms", "lower")
    yield from _parts(found)
    yield from _equality(found.equality)


def _parts(found: Found) -> Iterator[Figure]:
    """Each part of the handed-over time; and what prefill takes beyond all of the single process's
    first token, messages included."""
    beyond = [one.parts_ms[PREFILL] - one.single_ms[0] for one in found.rounds]
    for words in found.rounds[0].parts_ms:
        samples = [one.parts_ms[words] for one in found.rounds if words in one.parts_ms]
        yield Figure.of(f"part: {words}", samples, "ms", "lower")
    yield Figure.of("prefill less the single process's first token", beyond, "ms", "lower")


def _equality(equality: Equality) -> Iterator[Figure]:
    other = float(equality.prompts_with_other_kv)
    yield Figure("prompts whose KV differs", other, "prompts", 0.0, "lower", 1, 0.0)
    share = equality.flips / equality.positions
    words = f"answers' first other token, of {equality.positions} positions"
    yield Figure(words, share, "of positions", TIES, "lower", 1, 0.0)


def beside_figures(found: Beside, pace_gbps: float) -> Iterator[Figure]:
    """Those of `kvxfer bench beside`, of the rounds so far."""
    for name, words, bars in (
        (PACED, f"KV at {pace_gbps:g} GB/s", PACED_BARS),
        (SATURATED, "KV, saturated", SATURATED_BARS),
    ):
        ratios = found.ratios[name]
        yield Figure.of(f"inter-token p99 beside {words}", ratios.decode_p99, "×", "lower", bars[0])
        yield Figure.of(
            f"prefill's time beside {words}", ratios.prefill_mean, "×", "lower", bars[1]
        )
        least = REACHED * pace_gbps if name == PACED else None
        yield Figure.of(f"{words}: rate reached", ratios.gbps, "GB/s", "higher", least)
    noise = found.noise
    yield Figure.of("inter-token p99, quiet against quiet", noise.decode_p99, "×", "lower")
    yield Figure.of("prefill's time, quiet against quiet", noise.prefill_mean, "×", "lower")
    decode = [one["target"] for one in found.quiet]
    p99, p50 = ([getattr(one, name) for one in decode] for name in ("p99_ms", "median_ms"))
    prefill = [one["source"].mean_ms for one in found.quiet]
    yield Figure.of("inter-token p99, quiet", p99, "ms", "lower")
    yield Figure.of("inter-token median, quiet", p50, "ms", "lower")
    yield Figure.of("prefill's time, quiet", prefill, "ms", "lower")
    wrong = float(found.wrong_sets)
    yield Figure("sets of blocks that arrived wrong", wrong, "sets", 0.0, "lower", 1, 0.0)
    steps = float(found.wrong_steps)
    yield Figure("steps with other tokens than quiet", steps, "steps", 0.0, "lower", 1, 0.0)
