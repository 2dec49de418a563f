"""`kvxfer bench serving-overhead`: what the HTTP front costs, and how many streams it carries.

Three things, each with the front in a process of its own and the clients in this one:
- time to first byte in front of a worker that speaks the wire and answers at once: the router's own
  (HTTP, JSON, tokens to text, ZeroMQ there and back);
- the same in front of a whole prefill and a whole decode worker whose model computes nothing;
- many streams at once, in front of the first kind of worker at a steady pace, and more requests
  than the bound meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.bench.overhead_client import NAME, Answered, Client
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.errors import KvxferError, UsageError
from kvxfer.launch.local import LocalLauncher

START_TIMEOUT_S = 120.0
FIRST_BYTE_BAR_MS = 2.0
PROMPT_TOKENS = 32
WARM_UP = 50
"""Requests that are not counted."""
FRONT, WORKER = "kvxfer.bench.overhead_front", "kvxfer.bench.overhead_worker"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOverheadOptions:
    """What `kvxfer bench serving-overhead` may be told."""

    requests: int = 500
    """Measured one after the other for each time to first byte."""
    streams: int = 500
    """At once; also the front's bound."""
    beyond: int = 100
    """Requests sent while that many are under way."""
    tokens: int = 64
    """Of each of the streams' answers: enough for all to be open at once."""
    pace_s: float = 0.2
    """Between two tokens of a stream: 500 of them are 2,500 tokens a second."""
    json: Path | None = None
    """Write the figures to this file."""


def run_serving_overhead(options: ServingOverheadOptions) -> int:
    """Run, print, write; 1 when a bar was missed. Raises KvxferError."""
    for name, least in (("requests", 4), ("streams", 1), ("beyond", 0), ("tokens", 1)):
        if getattr(options, name) < least:
            raise UsageError(name, getattr(options, name), f"must be at least {least}")
    record = Record(options.json, command_line("serving-overhead", options))
    record.machine = describe_machine("cpu")
    with _launched() as launcher:
        front = _front(launcher, [_start(launcher, "worker", WORKER)], options.streams)
        found = asyncio.run(_one_by_one(front, options.requests))
        record.add(*_first_byte_figures("router alone", found, FIRST_BYTE_BAR_MS))
    with _launched() as launcher:
        front = _front(launcher, _pair(launcher), options.streams)
        found = asyncio.run(_one_by_one(front, options.requests))
        record.add(*_first_byte_figures("null pair", found, None))
    with _launched() as launcher:
        worker = _start(launcher, "worker", WORKER, "--pace-s", str(options.pace_s))
        front = _front(launcher, [worker], options.streams)
        record.add(*_many_figures(options, *asyncio.run(_many(front, options))))
    return record.exit_code


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def _launched() -> Iterator[LocalLauncher]:
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-overhead-") as directory,
        LocalLauncher(Path(directory), lambda name, text: None) as launcher,
    ):
        yield launcher


def _start(launcher: LocalLauncher, name: str, module: str, *arguments: str) -> str:
    """The address of what was started."""
    process = launcher.start(name, module, arguments)
    launcher.wait_for(lambda: bool(process.address), START_TIMEOUT_S, f"{name}'s address")
    return process.address


def _pair(launcher: LocalLauncher) -> list[str]:
    common = [
        *("--model", "none", "--device", "cpu", "--lane", "push", "--no-lane-test"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "512"),
    ]
    prefill = _start(launcher, "prefill", "prefill.null", *common, "--worker-id", "prefill-0")
    known = ("--worker-id", "decode-0", "--prefill", prefill)
    return [prefill, _start(launcher, "decode", "decode.null", *common, *known)]


def _front(launcher: LocalLauncher, workers: list[str], bound: int) -> str:
    dialled = [word for address in workers for word in ("--worker", address)]
    bounds = ("--max-concurrent-requests", str(bound))
    return _start(launcher, "front", FRONT, *dialled, *bounds)


# --- load -----------------------------------------------------------------------------------------


def _prompt() -> list[int]:
    return [random.randrange(256) for _ in range(PROMPT_TOKENS)]


async def _one_by_one(address: str, count: int) -> list[Answered]:
    """After some that are not counted. Raises KvxferError for one that did not come whole."""
    client = await Client.connect(address)
    found = [await client.stream(NAME, _prompt(), 1) for _ in range(WARM_UP + count)]
    await client.close()
    if wrong := [one for one in found if not one.is_whole]:
        raise KvxferError(f"{len(wrong)} of {len(found)} answers did not come whole: {wrong[0]}")
    return found[WARM_UP:]


async def _many(
    address: str, options: ServingOverheadOptions
) -> tuple[list[Answered], list[Answered]]:
    """The streams, and what came of the requests beyond them."""
    total = options.streams + options.beyond
    clients = [await Client.connect(address) for _ in range(total)]
    first, beyond = clients[: options.streams], clients[options.streams :]
    num_begun, all_begun = 0, asyncio.Event()

    def begun() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == options.streams:
            all_begun.set()

    asked = (one.stream(NAME, _prompt(), options.tokens, begun) for one in first)
    under_way = [asyncio.create_task(one) for one in asked]
    async with asyncio.timeout(START_TIMEOUT_S):
        await all_begun.wait()
    if any(one.done() for one in under_way):
        raise KvxferError("the streams were not all open at once: give more --tokens")
    refused = await asyncio.gather(*(one.stream(NAME, _prompt(), 1) for one in beyond))
    streams = await asyncio.gather(*under_way)
    for client in clients:
        await client.close()
    return streams, refused


# --- figures --------------------------------------------------------------------------------------


def _first_byte_figures(where: str, found: list[Answered], bar_ms: float | None) -> list[Figure]:
    samples = [1000 * one.first_byte_s for one in found]
    late = statistics.quantiles(samples, n=100)[98]
    p50 = Figure.of(f"serve: time to first byte, {where}, p50", samples, "ms", "lower", bar_ms)
    return [p50, Figure.of(f"serve: time to first byte, {where}, p99", [late], "ms", "lower")]


def _many_figures(
    options: ServingOverheadOptions, streams: list[Answered], beyond: list[Answered]
) -> list[Figure]:
    whole = [one for one in streams if one.is_whole and one.status == 200]
    for wrong in [one for one in streams if one not in whole][:3]:
        print(f"a stream went wrong: {wrong}", flush=True)
    limited = [one for one in beyond if one.status == 429 and one.retry_after_s >= 1]
    other = [one for one in beyond if one not in limited and not one.is_whole]
    tokens = len(whole) * options.tokens / max(one.took_s for one in streams)
    first = [1000 * one.first_byte_s for one in whole] or [0.0]
    return [
        Figure.of(
            f"serve: of {len(streams)} streams at once came whole",
            [len(whole)], "streams", "higher", len(streams),
        ),
        Figure.of("serve: tokens of all streams", [tokens], "/s", "higher"),
        Figure.of("serve: time to first byte, all at once, p50", first, "ms", "lower"),
        Figure.of(
            f"serve: of {len(beyond)} beyond the bound were told 429 and when to come back",
            [len(limited)], "requests", "higher", 1 if beyond else 0,
        ),
        Figure.of("serve: beyond it failed otherwise", [len(other)], "requests", "lower", 0),
    ]  # fmt: skip
