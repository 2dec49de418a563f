"""Whether a prompt gets through a pair of workers, by sending one."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from kvxfer.control.router_messages import Sampling
from kvxfer.errors import ControlError
from kvxfer.serve.front import Front
from kvxfer.serve.served import Limits, ServedModel

Outcome = tuple[bool, dict[str, Any]]
NUM_TOKENS = 4
"""Of the prompt: less than a block, so that no prefix cache has it and its KV has to travel."""


class Probe:
    """Asks for one token, with the hand-over of its prompt's KV; the outcome stands for a while,
    and is shared by all who ask meanwhile."""

    def __init__(self, front: Front, served: ServedModel, limits: Limits) -> None:
        self._front = front
        self._vocab_size = served.info.vocab_size
        self._timeout_s = limits.health_timeout_s
        self._cache_s = limits.health_cache_s
        self._outcome: Outcome = (False, {})
        self._good_until_s = 0.0
        self._running: asyncio.Task[None] | None = None

    async def outcome(self) -> Outcome:
        """Whether it got through, and what to tell of it; within the probe's deadline."""
        if time.monotonic() >= self._good_until_s:
            if self._running is None:
                self._running = asyncio.create_task(self._run())
            await asyncio.shield(self._running)
        return self._outcome

    async def _run(self) -> None:
        began_s = time.monotonic()
        try:
            problem, told = await self._ask()
        finally:
            self._running = None
        took_s = round(time.monotonic() - began_s, 6)
        state = {"status": "error", "reason": problem} if problem else {"status": "ok"}
        self._outcome = (not problem, {**state, "seconds": took_s, **told})
        self._good_until_s = time.monotonic() + self._cache_s

    async def _ask(self) -> tuple[str, dict[str, Any]]:
        """What went wrong, or ''."""
        wake = asyncio.Event()
        tokens = [random.randrange(self._vocab_size) for _ in range(NUM_TOKENS)]
        try:
            stream = self._front.submit(
                tokens, 1, wake, sampling=Sampling(), stop_token_ids=(), is_probe=True
            )
        except ControlError as error:
            return str(error), {}
        completion = stream.completion
        try:
            async with asyncio.timeout(self._timeout_s):
                while completion.finished is None:
                    await wake.wait()
                    wake.clear()
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s", {}
        finally:
            self._front.release(stream)
        finished = completion.finished
        if finished.reason == "overloaded":
            return "", {"note": f"not tried, workers are busy: {finished.error}"}
        told = {
            "prefill": completion.generate.prefill,
            "decode": completion.backend.name if completion.backend else "",
            "transfer_bytes": finished.transfer.num_bytes,
        }
        return finished.error, told
