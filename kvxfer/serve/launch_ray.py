"""`kvxfer launch ray`: from options to an exit code, with nothing left on the cluster."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvxfer.config import LAYOUT_VARIABLE, WorkerOptions
from kvxfer.control.auth import Keys
from kvxfer.errors import UsageError
from kvxfer.launch.ray_fleet import RayFleet
from kvxfer.launch.ray_seam import Bundle, Node, Order
from kvxfer.launch.ray_workers import Recipe
from kvxfer.serve.options import RayOptions
from kvxfer.serve.plan import as_arguments
from kvxfer.serve.progress import StartScreen
from kvxfer.serve.ray_plan import check_hosts, check_ray, placed
from kvxfer.serve.router import Router
from kvxfer.serve.run import OUR_VARIABLES, load_served, log_dir, start_log
from kvxfer.serve.service import Service
from kvxfer.serve.uvicorn_server import bind
from kvxfer.telemetry.spans import open_spans

ROLES = ("prefill", "decode")
FINISHING_S = 10.0
"""Beyond the longest request, for a worker that leaves."""


class RouterMembers:
    """Tells a router who there is."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def join(self, address: str, role: str) -> None:
        self._router.add(address, role)

    def leave(self, address: str) -> None:
        with contextlib.suppress(UsageError):  # it drained, and is known no more
            self._router.remove(address, "its process is gone")

    def drain(self, address: str) -> None:
        with contextlib.suppress(UsageError):  # somebody had it leave already
            self._router.drain(address, "there are to be fewer workers")


def run_launch_ray(
    options: RayOptions, worker: WorkerOptions, by_role: Mapping[str, WorkerOptions]
) -> int:
    """Place workers on a Ray cluster, and serve HTTP in front of them; options as of `run_serve`.
    Raises KvxferError."""
    start_log("launch", worker.log_format)
    check_ray(options, by_role)
    keys = _keys(worker, by_role)
    from kvxfer.launch.ray import RayCluster, connected, nodes

    with ExitStack() as stack:
        served = load_served(options, worker.model, worker.max_model_len)
        listener = stack.enter_context(bind(options.host, options.port))
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-launch-")))
        logs = log_dir(options, run_dir)
        ip = stack.enter_context(connected(options.address))
        found = nodes()
        check_hosts(found, ip, keys is not None)
        screen = StartScreen([])
        screen.say(_what_there_is(found))
        router = _router(worker, keys)
        stack.callback(router.close)
        spans = open_spans(worker.otlp_traces_endpoint, "router", "launch")
        stack.callback(spans.close)
        recipe = _recipe(options, by_role, found, ip, logs)
        cluster = RayCluster(options.placement_group_strategy)
        fleet = RayFleet(cluster, RouterMembers(router), recipe, screen.step)
        stack.callback(fleet.collect)
        stack.enter_context(cluster)
        stack.enter_context(screen)
        fleet.scale({"prefill": options.prefill, "decode": options.decode})

        def announce(line: str) -> None:
            screen.close()
            print(line, flush=True)

        Service(
            options, served, router, listener, spans=spans, supervisor=fleet, scale=fleet.scale,
            start_timeout_s=options.start_timeout_s, announce=announce, on_end=fleet.terminate,
        ).run()  # fmt: skip
    return 0


def _router(worker: WorkerOptions, keys: Keys | None) -> Router:
    return Router(
        worker.peer_timeout_s,
        survives_loss=True,
        request_timeout_s=worker.request_timeout_s,
        keys=keys,
    )


def _keys(worker: WorkerOptions, by_role: Mapping[str, WorkerOptions]) -> Keys | None:
    """The router's. Raises UsageError where it has none and workers have, or the other way
    round."""
    keys = Keys.load(worker.key_file, worker.peer_keys)
    for role, given in by_role.items():
        if (given.key_file is None) != (keys is None):
            reason = f"the {role} workers and the router need a key each, or none does"
            raise UsageError("key_file", str(given.key_file), reason)
    return keys


def _recipe(
    options: RayOptions,
    by_role: Mapping[str, WorkerOptions],
    found: list[Node],
    ip: str,
    logs: Path,
) -> Recipe:
    layout = os.environ.get(LAYOUT_VARIABLE, "")
    given: dict[str, WorkerOptions] = {}
    bundles: dict[str, Bundle] = {}
    for role in ROLES:
        given[role], bundles[role] = placed(options, by_role[role], found, ip)

    def order(role: str, number: int) -> Order:
        own = replace(given[role], worker_id=f"{role}-{number}")
        if own.metrics_port:  # some nodes have several of them
            both = 2 * number + ROLES.index(role)
            own = replace(own, metrics_port=own.metrics_port + both)
        return Order(
            name=own.worker_id,
            module=role,
            arguments=tuple(as_arguments(own)),
            is_on_loopback=own.key_file is None,
            environment={LAYOUT_VARIABLE: layout} if layout else {},
            without=OUR_VARIABLES,
        )

    longest_s = max(one.request_timeout_s for one in given.values())
    is_json = any(one.log_format == "json" for one in given.values())
    return Recipe(
        order, bundles, logs, options.placement_timeout_s, longest_s + FINISHING_S, is_json
    )


def _what_there_is(found: list[Node]) -> str:
    """One line on the cluster."""
    hosts = len({node.ip for node in found})
    sums = {name: sum(node.resources.get(name, 0) for node in found) for name in ("CPU", "GPU")}
    total = ", ".join(f"{count:g} {name}" for name, count in sums.items())
    return f"Ray cluster: {len(found)} nodes on {hosts} hosts, {total}"
