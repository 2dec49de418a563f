"""A Ray cluster that workers are placed on. The one module that imports ray.

Facts (Ray 2.60, tried by tests/launch/test_ray_cluster.py): a placement group keeps its size;
bundles of a node that died are placed on another one as soon as there is room, and an actor that
was asked for in one of them waits for that. A method of an actor with one thread runs in its main
thread. Actors and groups of a driver end with it, however it ends. Each node has a resource
'node:IP' of 1. `ray.init` takes SIGTERM for itself. A call may wait for the head node for a minute,
so all of them are made in a thread of their own. What actors are told is kept by the head node and
travels in the clear unless Ray was given TLS: no key is among it, only where its file lies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvxfer.errors import KvxferError, UsageError
from kvxfer.launch.ray_host import WorkerHost
from kvxfer.launch.ray_logs import last_line, one_line
from kvxfer.launch.ray_seam import Bundle, Look, Node, Order, missing_room

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    reason = f"needs {error.name}: pip install 'kvxfer[ray]'"
    raise UsageError("launch", "ray", reason) from None

logger = logging.getLogger(__name__)

TURN_S = 0.1
LOOK_S = 0.25
"""Between two looks at a worker."""
LOOK_TIMEOUT_S = 30.0
"""A host that started, and does not answer for so long, is lost: its node may be cut off."""
CONNECT_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 3.0
"""For a worker's own end (see `kvxfer.launch.local.GRACE_S`); then its actor is killed."""
LACKING_S = 2.0
"""Between two questions what the cluster has, while room is missing."""


class _Actor(WorkerHost):
    """A host on the node where Ray put it."""

    def __init__(self, order: Order) -> None:
        super().__init__(order, ray.util.get_node_ip_address())


@contextlib.contextmanager
def connected(address: str) -> Iterator[str]:
    """A driver of the cluster at `address`; '' as `ray.init()` decides: RAY_ADDRESS, one that runs
    on this host, else one that is started here and ends with us. Yields this node's IP address.
    Raises UsageError where there is no such cluster."""
    where = address or os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        reason = "Ray Client does not do: run this on a node of the cluster, with the address auto"
        raise UsageError("address", where, reason)
    _check_reachable(where)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=address or None, include_dashboard=None if where else False,
            log_to_driver=False, logging_level=logging.ERROR,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()
        raise UsageError("address", where, f"no Ray cluster: {one_line(error)}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise UsageError where nobody listens: Ray would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # auto, local: Ray knows itself
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            pass
    except (OSError, OverflowError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise UsageError("address", address, f"no Ray cluster: {text}") from None


def nodes() -> list[Node]:
    """Those that are alive now."""
    return [
        Node(str(one["NodeManagerAddress"]), {k: float(v) for k, v in one["Resources"].items()})
        for one in ray.nodes()
        if one["Alive"]
    ]


class RayGroup:
    """Its own calls and `is_placed` and `lacking` are for others, all else is for the thread."""

    def __init__(self, cluster: RayCluster, bundles: Sequence[Bundle]) -> None:
        self.is_placed = False
        self.lacking = ""
        self.bundles = bundles
        self.group: PlacementGroup | None = None
        self.placing: Any = None
        self.is_released = False
        self.next_question_s = 0.0
        self._cluster = cluster

    def start(self, index: int, order: Order, life: int) -> RayHost:
        host = RayHost(self, index, order, life)
        self._cluster.do(lambda: self._cluster.start(host))
        return host

    def release(self) -> None:
        self._cluster.do(lambda: setattr(self, "is_released", True))


class RayHost:
    """The actor's side of it is in the thread; `take` and `stop` are for the others."""

    def __init__(self, group: RayGroup, index: int, order: Order, life: int) -> None:
        self.lost, self.is_faulty = "", False
        self.group, self.index, self.order, self.life = group, index, order, life
        self.looks: deque[Look] = deque()
        self.wants_stop = False
        self.actor: Any = None
        self.asked: Any = None
        """The answer that is waited for."""
        self.asked_s = 0.0
        self.has_answered = False
        self.stop_by_s = 0.0
        """When it is killed; 0 while it shall not stop."""
        self.is_stopping = False
        """`asked` is the answer to that."""

    def take(self) -> list[Look]:
        found = []
        while self.looks:
            found.append(self.looks.popleft())
        return found

    def stop(self) -> None:
        self.wants_stop = True


class RayCluster:
    """Of a process that is `connected`. A context: nothing that it started outlives it."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._commands: deque[Callable[[], None]] = deque()
        self._hosts: list[RayHost] = []
        self._groups: list[RayGroup] = []
        self._failure: Exception | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-ray", daemon=True)

    def __enter__(self) -> RayCluster:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_closing = True
        self._thread.join(3 * STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the cluster does not answer; what runs there ends once it knows of us")

    # --- for the others -----------------------------------------------------------------------

    def reserve(self, bundles: Sequence[Bundle]) -> RayGroup:
        group = RayGroup(self, bundles)
        self.do(lambda: self._reserve(group))
        return group

    def check(self) -> None:
        if isinstance(self._failure, (ray.exceptions.RayError, ConnectionError)):
            raise KvxferError(f"the Ray cluster is gone: {one_line(self._failure)}")
        if self._failure is not None:
            raise self._failure

    def do(self, command: Callable[[], None]) -> None:
        """In the thread, soon."""
        self._commands.append(command)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing or self._hosts:
                self._turn(time.monotonic())
                time.sleep(TURN_S)
            for group in self._groups:
                self._give_back(group)
        except Exception as error:  # whatever it is, `check` raises it in the owner's thread
            self._failure = error

    def _turn(self, now_s: float) -> None:
        while self._commands:
            self._commands.popleft()()
        for group in list(self._groups):
            self._look_at_group(group, now_s)
        for host in list(self._hosts):
            try:
                self._look_at_host(host, now_s)
            except ray.exceptions.RayActorError as error:
                host.is_faulty = bool(error.actor_init_failed)
                self._lose(host, last_line(error) if host.is_faulty else one_line(error))
            except ray.exceptions.RayTaskError as error:  # as where kvxfer cannot be imported
                host.is_faulty = True
                self._lose(host, last_line(error))

    def _reserve(self, group: RayGroup) -> None:
        group.group = placement_group([dict(one) for one in group.bundles], self._strategy)
        group.placing = group.group.ready()
        group.next_question_s = time.monotonic() + LACKING_S
        self._groups.append(group)

    def _look_at_group(self, group: RayGroup, now_s: float) -> None:
        if group.is_released and not any(one.group is group for one in self._hosts):
            self._give_back(group)
            self._groups.remove(group)
        elif not group.is_placed and ray.wait([group.placing], timeout=0)[0]:
            group.is_placed = True
        elif not group.is_placed and now_s >= group.next_question_s:
            group.next_question_s = now_s + LACKING_S
            free = ray.available_resources()
            group.lacking = missing_room(group.bundles, self._strategy, nodes(), free)

    def _give_back(self, group: RayGroup) -> None:
        if group.group is not None:
            remove_placement_group(group.group)
            group.group = None

    def start(self, host: RayHost) -> None:
        bundle = host.group.bundles[host.index]
        host.actor = (
            ray.remote(_Actor)
            .options(
                name=f"kvxfer.{host.order.name}.{host.life}",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(host.group.group, host.index),
            )
            .remote(host.order)
        )
        self._hosts.append(host)

    def _look_at_host(self, host: RayHost, now_s: float) -> None:
        """Raises RayError for an actor that is gone."""
        if (host.wants_stop or self._is_closing) and not host.stop_by_s:
            host.stop_by_s = now_s + (STOP_TIMEOUT_S if host.has_answered else 0.0)
        if host.asked is not None and ray.wait([host.asked], timeout=0)[0]:
            asked, host.asked = host.asked, None
            host.looks.append(ray.get(asked))
            host.has_answered = True
            if host.is_stopping:
                self._lose(host, "stopped")
                return
        if host.stop_by_s and now_s >= host.stop_by_s:
            self._lose(host, "stopped")
        elif host.asked is None:
            self._ask(host, now_s)
        elif host.has_answered and now_s - host.asked_s > LOOK_TIMEOUT_S:
            self._lose(host, f"its node does not answer for {LOOK_TIMEOUT_S:g} s")

    def _ask(self, host: RayHost, now_s: float) -> None:
        if host.stop_by_s:
            host.asked, host.asked_s, host.is_stopping = host.actor.stop.remote(), now_s, True
        elif now_s - host.asked_s >= LOOK_S:
            host.asked, host.asked_s = host.actor.look.remote(), now_s

    def _lose(self, host: RayHost, why: str) -> None:
        """The actor ends, and its worker with it."""
        host.lost = why
        self._hosts.remove(host)
        ray.kill(host.actor, no_restart=True)
