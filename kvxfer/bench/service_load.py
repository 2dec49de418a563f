"""A service's steps as load: prefill, speculative decoding with a draft model, sampling.

    draft     k + 1 decode steps of the small model: k tokens, and the KV of the last of them
    verify    one pass of the served model over the last token and the k drafts of each sequence
    sample    temperature, sort, softmax, cumulative sum over the [sequences · (k + 1), V] logits
    accept    drafts as long as they are the served model's greedy choice, then that choice

All of its memory is what a server takes: recorded graphs, the drafts' own KV, logits, workspaces.
The sampled tokens are returned and the greedy ones go on, so that two runs can be compared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvxfer.bench.scratch import driver_of, open_cache
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import UsageError
from kvxfer.model.loader import inspect_model
from kvxfer.model.runner import ModelRunner, SequenceStep

Tables = Sequence[BlockTable]
"""One sequence's, group by group."""
Specs = Sequence[KVCacheSpec]


@dataclass(frozen=True, slots=True)
class LoadShape:
    """How much of everything."""

    sequences: int
    draft_tokens: int
    prompt_tokens: int
    steps: int
    """Speculative steps of one run, after prefill."""
    pass_tokens: int
    """Tokens of one pass of prefill."""
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "draft_tokens", "prompt_tokens", "steps", "pass_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(name, getattr(self, name), "must be at least 1")

    @property
    def max_tokens(self) -> int:
        """Of one sequence: all drafts of every step accepted, and one step more under way."""
        return self.prompt_tokens + (self.steps + 1) * (self.draft_tokens + 1)


@dataclass(eq=False)
class Request:
    """A request under way; KV is there for all its tokens but the last."""

    prompt: list[int]
    target: Tables
    draft: Tables
    tokens: list[int] = field(default_factory=list)


class DraftSide:
    """The small model and its own cache, large enough for every sequence of the load."""

    def __init__(
        self, model: Path, device: str, threads: int, block_size: int, shape: LoadShape,
        undo: ExitStack,
    ) -> None:  # fmt: skip
        """Loads and commits; `undo` closes. Raises UsageError for a load longer than the model."""
        info = inspect_model(model)
        check_length(shape, info.max_model_len)
        self.runner = ModelRunner.load(info, device, None, threads)
        undo.callback(self.runner.close)
        specs = self.runner.probe_specs(block_size)
        held = blocks_per_sequence(specs, shape)
        committed = [1 + shape.sequences * blocks for blocks in held]
        driver = driver_of(device)
        self.cache = open_cache(driver, specs, KVCacheLayout.LBHNC, committed, undo)
        for views in self.cache.views:
            for view in views:
                view.zero_()  # a GPU's fresh memory may be NaN, and warm-up reads what none wrote
        self.runner.bind(self.cache.views)
        self.tables = spread_tables(specs, shape, committed)

    def warm_up(self, shape: LoadShape) -> None:
        """Graphs and workspaces, as the served model's own warm-up takes them."""
        self.runner.warm_up(shape.pass_tokens, shape.sequences)


def check_length(shape: LoadShape, max_model_len: int) -> None:
    if shape.max_tokens > max_model_len:
        reason = f"sequences come to {shape.max_tokens} tokens, a model takes {max_model_len}"
        raise UsageError("prompt_tokens", shape.prompt_tokens, reason)


def blocks_per_sequence(specs: Specs, shape: LoadShape) -> list[int]:
    """What one sequence of the load holds in each group."""
    step = max(shape.pass_tokens, shape.draft_tokens + 1)
    return [spec.blocks_held(shape.max_tokens, step) for spec in specs]


def null_tables(specs: Specs, shape: LoadShape) -> list[Tables]:
    """Every entry the null block: for warm-up, where there is no other."""
    held = blocks_per_sequence(specs, shape)
    return [[BlockTable([0] * blocks) for blocks in held] for _ in range(shape.sequences)]


def spread_tables(specs: Specs, shape: LoadShape, committed: Sequence[int]) -> list[Tables]:
    """Blocks of all sequences spread over the committed ones, the last included.

    Raises UsageError when there are too few.
    """
    by_group = []
    held = blocks_per_sequence(specs, shape)
    for per_sequence, blocks in zip(held, committed, strict=True):
        needed, there = per_sequence * shape.sequences, blocks - 1
        if needed > there:
            raise UsageError("sequences", shape.sequences, f"need {needed} blocks of {there}")
        ids = [there - i * there // needed for i in range(needed)]
        by_group.append([BlockTable(ids[i :: shape.sequences]) for i in range(shape.sequences)])
    return [list(tables) for tables in zip(*by_group, strict=True)]


def digest_of(tokens: Sequence[Sequence[int]]) -> str:
    """32 hex digits over every token of every sequence."""
    text = ";".join(",".join(map(str, one)) for one in tokens)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class SpeculativeService:
    """Serves the load's sequences. One thread; the runners are the caller's."""

    def __init__(
        self, target: ModelRunner, draft: DraftSide, shape: LoadShape, tables: Sequence[Tables]
    ) -> None:
        """`tables` are the served model's, one list for each sequence."""
        check_length(shape, target.info.max_model_len)
        self.target = target
        self.draft = draft.runner
        self.shape = shape
        self.vocab_size = target.info.vocab_size
        self.source = random.Random(shape.seed)
        self.sequences = [
            Request(self.random_tokens(shape.prompt_tokens), ours, theirs)
            for ours, theirs in zip(tables, draft.tables, strict=True)
        ]
        self.accepted = 0
        """Drafted tokens that were accepted, of the run under way."""
        self._device = draft.cache.buffer.device
        self._generator = torch.Generator(self._device)

    def place(self, tables: Sequence[Tables]) -> None:
        """Move to other blocks; every sequence begins anew, at the next `run` or `prefill`."""
        for sequence, own in zip(self.sequences, tables, strict=True):
            sequence.target, sequence.tokens = own, []

    def random_tokens(self, count: int) -> list[int]:
        return [self.source.randrange(self.vocab_size) for _ in range(count)]

    def run(self, steps: int = 0) -> list[list[int]]:
        """All of the load from its beginning, `steps` steps (0: the shape's): each sequence's
        tokens, prompts included. The same every time, wherever the blocks lie."""
        self.accepted = 0
        self.prefill(self.sequences)
        self._generator.manual_seed(self.shape.seed)
        for _ in range(steps or self.shape.steps):
            self.step(self.sequences, self.shape.draft_tokens)
        return [list(sequence.tokens) for sequence in self.sequences]

    def exercise(self) -> None:
        """For warm-up: a run's first steps, and one at the longest context that a run comes to."""
        self.run(steps=1)
        for sequence in self.sequences:
            sequence.tokens = [0] * (self.shape.max_tokens - self.shape.draft_tokens - 1)
        self.step(self.sequences, self.shape.draft_tokens)

    def prefill(self, sequences: Sequence[Request]) -> None:
        """From the prompts, as many sequences a pass as fit; each gets its first token."""
        longest = max(len(sequence.prompt) for sequence in sequences)
        together = max(1, self.shape.pass_tokens // longest)
        for start in range(0, len(sequences), together):
            self._prefill(sequences[start : start + together])

    def _prefill(self, sequences: Sequence[Request]) -> None:
        ours = [SequenceStep(s.prompt, 0, s.target) for s in sequences]
        first = self.target.logits(ours).argmax(-1).tolist()
        self.draft.logits([SequenceStep(s.prompt, 0, s.draft) for s in sequences])
        for sequence, token in zip(sequences, first, strict=True):
            sequence.tokens = [*sequence.prompt, token]

    def decode(self, sequences: Sequence[Request]) -> None:
        """One token each, without drafts; the drafting model's KV keeps up."""
        ours, theirs = [], []
        for one in sequences:
            last, position = one.tokens[-1:], len(one.tokens) - 1
            ours.append(SequenceStep(last, position, one.target))
            theirs.append(SequenceStep(last, position, one.draft))
        self.draft.decode_step(theirs)
        for sequence, token in zip(sequences, self.target.decode_step(ours), strict=True):
            sequence.tokens.append(token)

    def step(self, sequences: Sequence[Request], draft_tokens: int) -> torch.Tensor:
        """One speculative step: at least one token more each. The sampled tokens [sequences,
        draft_tokens + 1], on the device."""
        drafts = self._drafted(sequences, draft_tokens)
        steps = [
            SequenceStep([one.tokens[-1], *draft], len(one.tokens) - 1, one.target)
            for one, draft in zip(sequences, drafts, strict=True)
        ]
        logits = torch.cat(self.target.verify(steps))
        sampled = self.sample(logits)
        greedy = logits.argmax(-1).view(len(steps), -1).tolist()
        for sequence, draft, best in zip(sequences, drafts, greedy, strict=True):
            agreed = 0
            while agreed < draft_tokens and draft[agreed] == best[agreed]:
                agreed += 1
            sequence.tokens += best[: agreed + 1]
            self.accepted += agreed
        return sampled.view(len(steps), -1)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """One token for each row of [R, V] logits, with the load's temperature and top-p."""
        return sample_nucleus(logits, self.shape.temperature, self.shape.top_p, self._generator)

    def _drafted(self, sequences: Sequence[Request], count: int) -> list[list[int]]:
        last = [one.tokens[-1] for one in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        for offset in range(count + 1):
            steps = [
                SequenceStep([token], len(one.tokens) - 1 + offset, one.draft)
                for token, one in zip(last, sequences, strict=True)
            ]
            last = self.draft.decode_step(steps)
            if offset < count:
                for draft, token in zip(drafts, last, strict=True):
                    draft.append(token)
        return drafts


@torch.inference_mode()
def sample_nucleus(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """[R, V] logits to [R] tokens, drawn in fp32 from the fewest likeliest whose probabilities
    reach `top_p`; all on the logits' device."""
    scores = logits.to(torch.float32, copy=True).div_(temperature)
    values, order = scores.sort(dim=-1, descending=True)
    probabilities = values.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    values.masked_fill_(outside, float("-inf"))
    noise = torch.empty_like(values).exponential_(generator=generator)
    choice = values.softmax(-1).div_(noise).argmax(-1, keepdim=True)
    return order.gather(-1, choice)[:, 0]
