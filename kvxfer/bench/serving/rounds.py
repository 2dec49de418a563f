"""A round: requests sent when they are due, as many at once as may be, and what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from kvxfer.bench.serving.client import Ask, Client, Gone
from kvxfer.bench.serving.metrics import Answer
from kvxfer.bench.serving.prompts import Prompt

NOT_SENT, STOPPED, SERVICE_GONE = "not sent", "stopped", "service gone"


@dataclass(slots=True)
class Round:
    """What a round came to, so far: one answer for each prompt once it is over, in no order."""

    began_s: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)
    """By the prompt's place."""
    gone: str = ""
    """Why it was cut short: the service cannot be reached any more, or it was stopped."""


async def send_all(
    client: Client,
    ask: Ask,
    prompts: Sequence[Prompt],
    max_concurrency: int,
    text_of: Callable[[Prompt], str],
    done: Callable[[Answer], None],
    found: Round,
) -> None:
    """Send each when it is due and, if `max_concurrency` is not 0, fewer than that are under way.

    `found` is filled as answers come, also when this is cancelled: then it has those that were
    under way, as 'stopped', and those that were not sent. It does not raise Gone: the round ends.
    """
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    found.began_s = time.monotonic()

    async def one(place: int, prompt: Prompt) -> None:
        due_s = found.began_s + prompt.at_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        async with slots or nullcontext():
            sent_s = time.monotonic()
            try:
                answer = await client.ask(ask, prompt, text_of(prompt), due_s)
            except asyncio.CancelledError:
                answer = _lost(prompt, STOPPED, due_s, sent_s)
                found.answers[place] = answer
                raise
        found.answers[place] = answer
        done(answer)

    try:
        async with asyncio.TaskGroup() as group:
            for place, prompt in enumerate(prompts):
                group.create_task(one(place, prompt))
    except* Gone as errors:
        found.gone = str(errors.exceptions[0])
        for answer in found.answers.values():
            if answer.failure == STOPPED:  # it would have heard so itself
                answer.failure = SERVICE_GONE
    finally:
        unsent = {at: _lost(one, NOT_SENT, 0.0, 0.0) for at, one in enumerate(prompts)}
        found.answers = unsent | found.answers


def _lost(prompt: Prompt, failure: str, due_s: float, sent_s: float) -> Answer:
    answer = Answer(len(prompt.tokens), prompt.num_output, due_s, sent_s)
    answer.failure = failure
    return answer


async def warm_up(
    client: Client, ask: Ask, prompts: Sequence[Prompt], text_of: Callable[[Prompt], str]
) -> list[Answer]:
    """Those, all at once. Raises Gone."""
    asked = [client.ask(ask, one, text_of(one), 0.0) for one in prompts]
    return await asyncio.gather(*asked)
