"""NIXL: the transport between hosts, and between processes of one host (UCX backend).

Facts, measured with nixl 1.5.1 (UCX 1.23) on Linux, two processes unless said:
- Metadata only adds: a range disappears for a peer only with the agent that announced it.
- `remove_remote_agent` under a transfer blinds the initiator (its status turns NOT_FOUND) and stops
  nothing: 480 MiB of a 512 MiB READ over TCP landed in the two seconds after it, and a WRITE
  arrived whole. Releasing a handle in progress stops nothing either. So an agent is removed and a
  handle released only after the transfer ended; a disconnected peer's tickets end no earlier.
- Same-host host memory moves by cross-memory attach inside `transfer()`, GIL released; over TCP
  both ends must make progress, by the progress thread or by polling.
- The progress thread spins. On 2 cores it halves the bandwidth and costs 200 times the latency.
- VMM memory on a GPU moves at 0.5 GB/s unless UCX_RMA_PPLN_ENABLE=y is set before NIXL starts UCX.
- UCX's defaults never notice a cut link. A 10 s user timeout with keepalive 2 s + 4 × 2 s survives
  a blip of 1.5 s. A stopped process is never noticed: deadlines are the worker's.
- With Debian's libibverbs1 a process that had an agent ends with SIGSEGV unless UCX_MODULES=^ib.
- `get_xfer_descs` answers None, without an exception, for input that it does not understand.
- A handle keeps its last status: after DONE or an error, `check_xfer_state` says it again.
- NIXL drops a peer's metadata by itself when the connection breaks, but not the connection:
  `remove_remote_agent` is still needed before the peer can be added again. It takes unknown names.
- NIXL's exceptions share no base class; the C++ side prints to stderr unless NIXL_LOG_LEVEL=FATAL.
- Importing nixl sets `logging.raiseExceptions` to False for the whole process (read in its source).
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.agent import Agent, AgentConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Int64Array, Region

_ENVIRONMENT = {
    "UCX_RMA_PPLN_ENABLE": "y",
    "UCX_TCP_USER_TIMEOUT": "10s",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "2s",
    "UCX_TCP_KEEPCNT": "4",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Set before NIXL starts UCX, where the user has set nothing."""

PROGRESS_THREAD = "KVXFER_NIXL_PROGRESS_THREAD"
"""Environment variable: 1 or 0 overrides the rule of `wants_progress_thread`."""

_CORES_TO_SPARE = 8


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A posted handle; `failure` is what posting it said, if that went wrong."""

    handle: Any
    failure: ConnectorError | None = None


class NixlAgent(Agent):
    """A NIXL agent with the UCX backend, one registration a region."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        self._segment = segment_of(memory.device)[0]
        self._memory = memory
        progress_thread = wants_progress_thread()
        self._api = _load_nixl()
        with _translated("agent"):
            config = self._api.nixl_agent_config(
                enable_prog_thread=progress_thread, backends=["UCX"]
            )
            self._agent = self._api.nixl_agent(name, config)
        if "UCX" not in self._agent.backends:
            raise ConnectorError("NIXL has no UCX plugin here")

    def register(self, region: Region) -> Any:
        with _translated("register_memory"):
            return self._agent.register_memory(self._ranges([region]), self._segment)

    def deregister(self, handle: Any) -> None:
        with _translated("deregister_memory"):
            self._agent.deregister_memory(handle)

    def metadata(self, regions: Sequence[Region]) -> bytes:
        """Always with the connection, so that it serves a new peer and a known one alike."""
        with _translated("get_partial_agent_metadata"):
            segment = self._agent.nixl_mems[self._segment]
            ranges = self._api.nixlBind.nixlRegDList(segment, self._ranges(regions))
            blob: bytes = self._agent.get_partial_agent_metadata(ranges, True, ["UCX"])
        return blob

    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        segment_of(remote.device)
        with _translated(f"add_remote_agent of {remote.agent}"):
            loaded = self._agent.add_remote_agent(metadata)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded != remote.agent:
            self.remove_peer(loaded)
            raise ConnectorError(f"description of agent {remote.agent} is that of {loaded}")

    def remove_peer(self, agent: str) -> None:
        with _translated("remove_remote_agent"):
            self._agent.remove_remote_agent(agent)

    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> _Transfer:
        push = direction is Direction.PUSH
        ours, theirs = plan.src_offsets, plan.dst_offsets
        if not push:
            ours, theirs = theirs, ours
        local = _rows(self._memory.base_address, ours, plan.sizes, self._memory.device)
        far = _rows(remote.base_address, theirs, plan.sizes, remote.device)
        with _translated(f"initialize_xfer with {remote.agent}"):
            here = self._agent.get_xfer_descs(local, self._segment)
            there = self._agent.get_xfer_descs(far, segment_of(remote.device)[0])
            if here is None or there is None:
                raise ConnectorError("NIXL did not understand the descriptors of a plan")
            operation = "WRITE" if push else "READ"
            handle = self._agent.initialize_xfer(operation, here, there, remote.agent)
        try:
            with _translated(f"transfer with {remote.agent}"):
                self._agent.transfer(handle)  # its answer is what check_xfer_state will repeat
        except ConnectorError as failure:
            return _Transfer(handle, failure)  # some runs may have moved
        return _Transfer(handle)

    def is_finished(self, handle: _Transfer) -> bool:
        try:
            if handle.failure is not None:
                raise handle.failure
            with _translated("check_xfer_state"):
                state = self._agent.check_xfer_state(handle.handle)
            if state not in ("DONE", "PROC"):
                raise ConnectorError(f"NIXL ended a transfer in state {state}")
        except ConnectorError:
            self._release(handle)
            raise
        if state == "PROC":
            return False
        self._release(handle)
        return True

    def progress(self) -> None:
        """Serves peers where there is no progress thread; notifications carry nothing of ours."""
        with _translated("get_new_notifs"):
            self._agent.get_new_notifs()

    def _release(self, ended: _Transfer) -> None:
        with _translated("release_xfer_handle"):
            self._agent.release_xfer_handle(ended.handle)

    def _ranges(self, regions: Sequence[Region]) -> Int64Array:
        offsets = np.array([region.offset for region in regions], dtype=np.int64)
        sizes = np.array([region.size for region in regions], dtype=np.int64)
        return _rows(self._memory.base_address, offsets, sizes, self._memory.device)


class NixlConnector(AgentConnector):
    """Moves bytes with NIXL."""

    agent_class = NixlAgent
    preferred_layout = "LBHNC"  # vLLM's NixlConnector asks for heads outside tokens, too


def wants_progress_thread() -> bool:
    """On from 8 usable cores up, since it spins on one; the environment overrides."""
    choice = os.environ.get(PROGRESS_THREAD, "")
    if choice not in ("", "0", "1"):
        raise UsageError(PROGRESS_THREAD, choice, "must be 0 or 1")
    if choice:
        return choice == "1"
    return len(os.sched_getaffinity(0)) >= _CORES_TO_SPARE


def segment_of(device: str) -> tuple[str, int]:
    """NIXL's memory type and device id of torch's device name; ConnectorError for others."""
    if device == "cpu":
        return "DRAM", 0
    found = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device)
    if found:
        return "VRAM", int(found[1] or 0)
    raise ConnectorError(f"NIXL moves no memory of device {device!r}")


def _rows(base: int, offsets: Int64Array, sizes: Int64Array, device: str) -> Int64Array:
    """[N, 3] of (address, bytes, device id)."""
    rows = np.empty((len(offsets), 3), dtype=np.int64)
    rows[:, 0] = offsets + base
    rows[:, 1] = sizes
    rows[:, 2] = segment_of(device)[1]
    return rows


@functools.cache
def _load_nixl() -> Any:
    """nixl._api, with the environment it reads prepared. Costs seconds: it imports torch."""
    defaults = dict(_ENVIRONMENT)
    rdma = Path("/sys/class/infiniband")
    if not rdma.is_dir() or not any(rdma.iterdir()):
        defaults["UCX_MODULES"] = "^ib"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise ConnectorError(f"nixl cannot be imported: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    return _api


@functools.cache
def _foreign_errors() -> tuple[type[Exception], ...]:
    """Every exception class of the bindings, and what pybind makes of C++ exceptions."""
    found = [value for value in vars(_load_nixl().nixlBind).values() if isinstance(value, type)]
    own = [value for value in found if issubclass(value, Exception)]
    return (*own, RuntimeError, ValueError)


@contextmanager
def _translated(call: str) -> Iterator[None]:
    """The one place where an exception of NIXL becomes one of ours."""
    try:
        yield
    except _foreign_errors() as error:
        raise ConnectorError(f"NIXL {call}: {type(error).__name__}: {error}") from error


CONNECTOR = NixlConnector
