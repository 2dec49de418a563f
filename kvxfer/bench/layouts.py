"""`kvxfer bench layouts`: the time of a decode step in each of the six layouts.

The weights are loaded once. Each layout has a cache of its own, with the same KV in the same
blocks, and a runner with its own recorded steps. Steps are timed in turns, one of each layout,
so that what drifts hits all alike; ratios are of steps of the same round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.bench.models import model_pair
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure
from kvxfer.errors import UsageError


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutsOptions:
    """What `kvxfer bench layouts` may be told."""

    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    model: Path | None = None
    """Model directory (default: random weights in the shape of Llama 3.2 1B; on the CPU the bundled
    model)."""
    contexts: tuple[int, ...] = (1024, 8192)
    """Tokens of context; given once for each length."""
    batch: int = 32
    """Sequences of a step."""
    rounds: int = 50
    """Steps timed of each layout and context."""
    warm_up_rounds: int = 10
    """Steps of each before, which are not."""
    block_size: int = 16
    """Tokens per block."""
    threads: int = 1
    """CPU threads of the model."""
    json: Path | None = None
    """Keep the figures in this file, from the first ones on."""


def run_layouts(options: LayoutsOptions) -> int:
    """Measure, print, write; 1 when the layouts' tokens differ. Raises KvxferError."""
    from kvxfer.worker.device import resolve_device

    for name in ("batch", "rounds", "block_size", "threads"):
        if getattr(options, name) < 1:
            raise UsageError(name, getattr(options, name), "must be at least 1")
    if options.warm_up_rounds < 0:
        raise UsageError("warm_up_rounds", options.warm_up_rounds, "is negative")
    if not options.contexts or min(options.contexts) < 8:
        raise UsageError("contexts", list(options.contexts), "must be 8 tokens at the least")
    device = resolve_device(options.device)
    with model_pair(options.model, None, device, max(options.contexts)) as pair:
        return _measure(options, pair.target, device)


def _measure(options: LayoutsOptions, model: Path, device: str) -> int:
    from kvxfer.bench.layout_steps import LayoutSteps
    from kvxfer.bench.report import describe_machine

    record = Record(options.json, command_line("layouts", options))
    record.machine = describe_machine(device)
    with LayoutSteps(model, device, options) as steps:
        for context in options.contexts:
            agreement = steps.agreement(context)
            print(f"{context} tokens: {agreement.describe()}", flush=True)
            name = f"layouts_tokens_equal_{context}"
            record.add(Figure(name, float(agreement.tokens), "0/1", 1.0, "higher", 1, 0.0))
            name = f"layouts_logits_equal_{context}"
            record.add(Figure(name, float(agreement.logits), "0/1", None, "higher", 1, 0.0))
            times = steps.times_ms(context, options.warm_up_rounds, options.rounds)
            record.add(*_figures(times, context, options.batch))
    return record.exit_code


def _figures(times: dict[str, list[float]], context: int, batch: int) -> list[Figure]:
    """By layout: the median step, and the median of its ratios to the best layout's step of the
    same round."""
    where = f"{context} tokens, batch {batch}"
    steps = {
        layout: Figure.of(f"decode_step {layout} ({where})", samples, "ms", "lower")
        for layout, samples in times.items()
    }
    best = times[min(steps, key=lambda layout: steps[layout].value)]
    ratios = [
        Figure.of(
            f"decode_step_ratio_to_best {layout} ({where})",
            [one / other for one, other in zip(samples, best, strict=True)],
            "×",
            "lower",
        )
        for layout, samples in times.items()
    ]
    return [*steps.values(), *ratios]
