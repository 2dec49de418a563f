"""What the control plane costs, timed piece by piece: the real functions, on made-up clusters.

| costs         | are of                                                                          |
| ---           | ---                                                                             |
| place_pair_s  | `kvxfer.serve.pairing.choose_pair`: it looks at each pair that is as good as    |
|               | the best, of idle workers at all of them                                        |
| place_*       | `kvxfer.serve.estimates`, without that: it gathers what is known of each worker,|
|               | and goes through all requests under way for each                                |
| status_*      | a worker's Status, taken off the wire and taken in                              |
| message_s     | a heartbeat, sent or received: half of both, on one thread                      |
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median

from kvxfer.bench.simulate.fit import fit_sum
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.channel import Channel
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.messages import Heartbeat
from kvxfer.control.router_messages import Generate, Sampling, Status
from kvxfer.control.wire import decode, encode
from kvxfer.errors import ControlError, DeadlineExceeded
from kvxfer.serve.backend import Backend
from kvxfer.serve.completion import Completion
from kvxfer.serve.estimates import Estimates
from kvxfer.serve.pairing import DecodeSide, PrefillSide, choose_pair

SIDES = (8, 16, 32, 64)
"""Workers of each role in the made-up clusters."""
UNDER_WAY = (0, 64, 256)
PROMPT_TOKENS = 1024
REPEATS = 5
MESSAGES = 500
TIMEOUT_S = 10.0
SPEC = KVCacheSpec(32, 8, 128, 128, "bfloat16", 16)


def measure_placing() -> dict[str, float]:
    """By the name in `Costs`; some seconds. Raises DeadlineExceeded where messages get lost."""
    fixed_s, worker_s, pair_s = _pairs()
    rows, totals = [], []
    for side in SIDES:
        for under_way in UNDER_WAY:
            rows.append((1.0, 2.0 * side, 2.0 * side * under_way))
            pairs_s = fixed_s + worker_s * 2 * side + pair_s * side * side
            totals.append(max(1e-6, _gathering_s(side, under_way) - pairs_s))
    gather_s, gather_worker_s, flight_s = fit_sum(rows, totals)
    status_s, peer_s = _statuses()
    return {
        "place_s": fixed_s + gather_s,
        "place_worker_s": worker_s + gather_worker_s,
        "place_flight_s": flight_s,
        "place_pair_s": pair_s,
        "status_s": status_s,
        "status_peer_s": peer_s,
        "message_s": _message_s(),
    }


def _timed(call: Callable[[], object]) -> float:
    """The median of several calls."""
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return median(found)


def _pairs() -> list[float]:
    """Of a choice, of each worker in it, and of each pair: of idle workers all are as good."""
    rows, totals = [], []
    for side in SIDES:
        prefills = [PrefillSide(0, PROMPT_TOKENS, 3e4, False)] * side
        decodes = [DecodeSide(0.0, 0, 128, 1e3, 1 << 20, False)] * side
        chance = random.Random(side)
        call = lambda p=prefills, d=decodes, c=chance: choose_pair(p, d, lambda *_: 1e11, c)  # noqa: E731
        rows.append((1.0, 2.0 * side, float(side * side)))
        totals.append(_timed(call))
    return fit_sum(rows, totals)


def _gathering_s(side: int, under_way: int) -> float:
    """Of a whole choice, in a cluster of idle workers, but for requests that are told tokens."""
    prefills = [_backend("prefill", at, 0) for at in range(side)]
    decodes = [_backend("decode", at, side) for at in range(side)]
    completions = {str(at): _completion(at, decodes[at % side]) for at in range(under_way)}
    for at, one in enumerate(completions.values()):
        one.prefill, one.output = prefills[at % side], [1]
    estimates = Estimates(completions)
    return _timed(lambda: estimates.place(_completion(-1, None), prefills, decodes))


def _completion(at: int, backend: Backend | None) -> Completion:
    tokens = list(range(PROMPT_TOKENS))
    generate = Generate(str(at), tokens, 128, Sampling(), [], "", False)
    return Completion(str(at), tokens, backend, 0.0, generate, float("inf"), is_free=True)


def _backend(role: str, at: int, num_peers: int) -> Backend:
    geometry = CacheGeometry.build([SPEC], [KVCacheLayout.LBNHC], [1000], 1 << 21)
    name = f"{role}-{at}"
    facts = WorkerFacts(
        role, name, name, "m", geometry, [RankFacts(0, b"", [b""])], [], [], "h", "cuda", "",
        False, [], 0, 0, 1 << 20,
    )  # fmt: skip
    found = Backend(f"out:tcp://{name}", facts, role=role)
    found.status = _values(num_peers)
    return found


def _values(num_peers: int) -> dict[str, int | float | str]:
    known: dict[str, int | float | str] = {"blocks_free": 1 << 30, "requests": 0, "peers": 1}
    for peer in range(num_peers):
        known[f"lane prefill-{peer}"] = "peer/pull"
        known[f"lane_gbps prefill-{peer}"] = 100.0
    return known


def _statuses() -> list[float]:
    rows, totals = [], []
    backend, estimates = _backend("decode", 0, 0), Estimates({})
    for num_peers in (0, 50, 200, 500):
        data = encode(Status("decode-0", _values(num_peers)))

        def take(data: bytes = data) -> None:
            message = decode(data)
            assert isinstance(message, Status)
            estimates.told(backend, message.values)

        rows.append((1.0, float(num_peers)))
        totals.append(_timed(take))
    return fit_sum(rows, totals)


def _message_s() -> float:
    """A heartbeat from one socket to another of this thread, a burst of them: half of the time."""
    ends = [Channel("simulate.a", "tcp://127.0.0.1:0"), Channel("simulate.b")]
    try:
        key = ends[1].dial(ends[0].address)
        _greet(ends[1], key)
        _pass(ends, key, MESSAGES, 1)
        return _timed(lambda: _pass(ends, key, MESSAGES)) / MESSAGES / 2
    finally:
        for end in ends:
            end.close()


def _greet(end: Channel, key: str) -> None:
    """A first message, as soon as there is a connection."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            end.send(key, Heartbeat())
            return
        except ControlError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def _pass(ends: list[Channel], key: str, count: int, came_before: int = 0) -> None:
    """`came_before`: messages that are under way already."""
    deadline_s = time.monotonic() + TIMEOUT_S
    for _ in range(count):
        ends[1].send(key, Heartbeat())
    got = -came_before
    while got < count:
        got += len(ends[0].poll(0.05))
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"timing messages: {got} of {count} came in {TIMEOUT_S:g} s")
