"""Whether prompts get through the pairs of workers, by sending one through each.

Pairs are those of workers that are ready and that have agreed on a lane. They are probed one after
the other, those first whose last probe is longest ago, and no new one is begun once half of the
time is over: so that each has at least the other half, and all together no more than the whole.
What is told names each pair that was probed, and counts the others.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from kvxfer.control.router_messages import Sampling
from kvxfer.errors import ControlError
from kvxfer.serve.backend import Backend
from kvxfer.serve.front import Front
from kvxfer.serve.served import Limits, ServedModel

Outcome = tuple[bool, dict[str, Any]]
Pair = tuple[str, Backend | None]
"""Id of a prefill worker, '' where decode chooses; None: the router does."""
NUM_TOKENS = 4
"""Of the prompt: less than a block, so that no prefix cache has it and its KV has to travel."""


class Probe:
    """Asks for one token of each pair, with the hand-over of its prompt's KV; the outcome stands
    for a while, and is shared by all who ask meanwhile: no two prompts of it are under way."""

    def __init__(self, front: Front, served: ServedModel, limits: Limits) -> None:
        self._front = front
        self._vocab_size = served.info.vocab_size
        self._timeout_s = limits.health_timeout_s
        self._cache_s = limits.health_cache_s
        self._outcome: Outcome = (False, {})
        self._good_until_s = 0.0
        self._running: asyncio.Task[None] | None = None
        self._probed_s: dict[tuple[str, str], float] = {}
        """When each pair that is there was probed last, by worker ids."""

    async def outcome(self) -> Outcome:
        """Whether all that were probed got through, and what to tell of it; within the deadline."""
        if time.monotonic() >= self._good_until_s:
            if self._running is None:
                self._running = asyncio.create_task(self._run())
            await asyncio.shield(self._running)
        return self._outcome

    async def _run(self) -> None:
        began_s = time.monotonic()
        try:
            pairs = self._pairs()
            probed = await self._probe(pairs, began_s)
        finally:
            self._running = None
        problems = [one["reason"] for one in probed if one["status"] == "error"]
        told: dict[str, Any] = {"status": "error" if problems else "ok"}
        if problems:
            told["reason"] = problems[0]
        told["seconds"] = round(time.monotonic() - began_s, 6)
        told["pairs"] = probed
        told["num_not_probed"] = len(pairs) - len(probed)
        self._outcome = not problems, told
        self._good_until_s = time.monotonic() + self._cache_s

    def _pairs(self) -> list[Pair]:
        """Those in use, the next to be probed first; one that the router chooses where it knows of
        none, which tells what is wrong."""
        prefills = sorted(one.name for one in self._front.ready("prefill"))
        found: list[tuple[str, Backend]] = []
        for decode in self._front.ready("decode"):
            known = decode.status
            met = [one for one in prefills if not known or f"lane {one}" in known]
            found += [(one, decode) for one in (met if prefills else [""])]
        names = {(prefill, decode.name) for prefill, decode in found}
        self._probed_s = {pair: at for pair, at in self._probed_s.items() if pair in names}
        found.sort(key=lambda one: (self._probed_s.get((one[0], one[1].name), 0.0), one[0]))
        return [*found] or [("", None)]

    async def _probe(self, pairs: list[Pair], began_s: float) -> list[dict[str, Any]]:
        probed: list[dict[str, Any]] = []
        deadline_s = began_s + self._timeout_s
        for prefill, decode in pairs:
            now_s = time.monotonic()
            if probed and now_s >= began_s + self._timeout_s / 2:
                break
            if decode is not None:
                self._probed_s[prefill, decode.name] = now_s
            told = {"prefill": prefill, "decode": decode.name if decode is not None else ""}
            told |= await self._ask(prefill, decode, deadline_s)
            probed.append({**told, "seconds": round(time.monotonic() - now_s, 6)})
        return probed

    async def _ask(self, prefill: str, decode: Backend | None, deadline_s: float) -> dict[str, Any]:
        """What came of one pair: its status is ok, busy, gone (both are no problem) or error."""
        wake = asyncio.Event()
        tokens = [random.randrange(self._vocab_size) for _ in range(NUM_TOKENS)]
        try:
            stream = self._front.submit(
                tokens, 1, wake, sampling=Sampling(), stop_token_ids=(), is_probe=True,
                decode=decode, prefill=prefill,
            )  # fmt: skip
        except ControlError as error:
            return {"status": "error", "reason": str(error)}
        completion, left_s = stream.completion, deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                while completion.finished is None:
                    await wake.wait()
                    wake.clear()
        except TimeoutError:
            return {"status": "error", "reason": f"no answer within {left_s:.3g} s"}
        finally:
            self._front.release(stream)
        finished = completion.finished
        if finished.reason == "overloaded":
            return {"status": "busy", "reason": f"not tried: {finished.error}"}
        if finished.error:
            return {"status": "error", "reason": finished.error}
        served_by = completion.backend
        if decode not in (None, served_by) or prefill not in ("", finished.prefill):
            ready = [one.name for role in ("prefill", "decode") for one in self._front.ready(role)]
            is_there = prefill in (*ready, "") and decode is not None and decode.name in ready
            reason = "another pair had to take it" if is_there else "one of them left meanwhile"
            return {"status": "error" if is_there else "gone", "reason": reason}
        return {
            "status": "ok",
            "prefill": finished.prefill,
            "decode": served_by.name if served_by is not None else "",
            "transfer_bytes": finished.transfer.num_bytes,
        }
