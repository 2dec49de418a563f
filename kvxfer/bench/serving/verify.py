"""The proof that a P/D service gives what one process gives, outside of what is measured.

The first round's prompts go to a new P/D service under the same load, then, one after the other,
to a single process with the threads of one worker: chunks and threads are the same, so that on the
CPU every bit is (README, 'What equality means').
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from kvxfer.bench.report import Figure
from kvxfer.bench.serving.client import Ask, open_client
from kvxfer.bench.serving.metrics import Answer
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import Prompt
from kvxfer.bench.serving.rounds import Round, send_all
from kvxfer.bench.serving.screen import Screen
from kvxfer.bench.serving.services import Service, start_pd, start_single
from kvxfer.errors import WorkerDied


def not_verified(count: int) -> Figure:
    return Figure.of("serving, verified: could not be compared", [count], "answers", "lower", 0)


def verify(
    options: ServingOptions,
    prompts: list[Prompt],
    directory: Path,
    screen: Screen,
) -> list[Figure]:
    """What differs: prompts whose KV does, and answers whose tokens do. Raises WorkerDied where a
    service could not be asked."""
    screen.say("verifying: kvxfer serve, then a single process")
    with start_pd(options, directory, screen.say) as service:
        ours = _answers(options, service, prompts, options.max_concurrency, screen)
    at_once = [replace(one, at_s=0.0) for one in prompts]
    with start_single(options, directory, screen.say, options.threads) as service:
        theirs = _answers(options, service, at_once, 1, screen)
    failed = [one for one in (*ours, *theirs) if one.failure]
    pairs = [(one, two) for one, two in zip(ours, theirs, strict=True) if not one.failure]
    pairs = [(one, two) for one, two in pairs if not two.failure]
    kv = sum(one.kv_digests != two.kv_digests for one, two in pairs)
    tokens = sum(one.tokens != two.tokens for one, two in pairs)
    for one in failed[:3]:
        screen.say(f"verifying: {one.failure}: {one.detail}")
    count = f"of {len(pairs)}"
    # Batches of another shape may round otherwise: tokens have no bar, KV has.
    return [
        not_verified(len(failed)),
        Figure.of(f"serving, verified: {count} prompts' KV differs", [kv], "prompts", "lower", 0),
        Figure.of(
            f"serving, verified: {count} answers' tokens differ", [tokens], "answers", "lower"
        ),
    ]


def _answers(
    options: ServingOptions,
    service: Service,
    prompts: list[Prompt],
    max_concurrency: int,
    screen: Screen,
) -> list[Answer]:
    """Of each prompt, in their order."""
    found = Round()

    async def send() -> None:
        async with open_client("") as client:
            model = await client.model(service.url, "")
            ask = Ask(
                url=service.url,
                endpoint=options.endpoint,
                model=model.id,
                ignores_eos=True,
                returns_token_ids=True,
                honors_retry_after=options.honor_retry_after,
                request_timeout_s=options.request_timeout_s,
                verify=True,
            )
            with screen.bar(f"verifying, {service.name}", len(prompts)) as step:
                await send_all(
                    client, ask, prompts, max_concurrency, lambda _: "", lambda _: step(), found
                )

    asyncio.run(send())
    if found.gone:
        raise WorkerDied(f"verifying, {service.name}: the service is gone: {found.gone}")
    return [found.answers[place] for place in range(len(prompts))]
