"""What the control plane does all the time in the model, whether requests come or not.

| every                | who          | does                                                       |
| ---                  | ---          | ---                                                        |
| peer_timeout_s / 6   | each worker  | sends each peer a heartbeat and where its regions are, at  |
|                      |              | once; takes in as many of theirs, which come spread out    |
| STATUS_S             | the router   | asks each worker how it is; decode's answers tell of each  |
|                      |              | lane                                                       |
| growth               | the grower   | tells each peer, which takes it in and answers             |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import simpy

from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.servers import Server
from kvxfer.serve.fleet import STATUS_S

BEATS_IN_TIMEOUT = 6
"""As `kvxfer.worker.liveness` has it."""
PER_BEAT = 2
"""Messages to a peer: the heartbeat, and where our regions are."""
PARTS = 2
"""In which what comes between two heartbeats, or two questions, is taken in: few events."""


def start_heartbeats(
    env: simpy.Environment,
    costs: Costs,
    sides: Sequence[Sequence[Server]],
    peer_timeout_s: float,
    chance: np.random.Generator,
) -> None:
    """`sides`: control threads of prefill, and of decode; each has all of the other as peers."""
    if not costs.message_s:
        return
    pause_s = peer_timeout_s / BEATS_IN_TIMEOUT
    for own, others in (sides, sides[::-1]):
        work_s = PER_BEAT * len(others) * costs.message_s
        for control in own:
            first_s = float(chance.uniform(0, pause_s))
            env.process(_beat(env, control, work_s, pause_s, first_s))


def _beat(
    env: simpy.Environment, control: Server, work_s: float, pause_s: float, first_s: float
) -> simpy.events.ProcessGenerator:
    yield env.timeout(first_s)
    while True:
        control.add(work_s)
        for _ in range(PARTS):
            yield env.timeout(pause_s / PARTS)
            control.add(work_s / PARTS)


def start_status(
    env: simpy.Environment, costs: Costs, front: Server, num_prefill: int, num_decode: int
) -> None:
    each_s = costs.status_s * (num_prefill + num_decode)
    work_s = each_s + costs.status_peer_s * num_prefill * num_decode
    if work_s:
        env.process(_ask(env, front, work_s))


def _ask(env: simpy.Environment, front: Server, work_s: float) -> simpy.events.ProcessGenerator:
    while True:
        for _ in range(PARTS):
            yield env.timeout(STATUS_S / PARTS)
            front.add(work_s / PARTS)


def announce_growth(grower: Server, peers: Sequence[Server], costs: Costs) -> None:
    """RegionsUpdate to each peer, and its answer."""
    if costs.message_s:
        for peer in peers:
            peer.add(2 * costs.message_s)
        grower.add(2 * len(peers) * costs.message_s)
