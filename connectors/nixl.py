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
- The first transfer with a peer makes the connection: 55-120 ms on the host, over cross-memory
  attach and TCP alike, against 0.3-1 later. On GPUs the first over new regions ran at a tenth of
  the rate. So of every peer, and on GPUs of every new region, a little is read ahead of use.
- UCX has the owner answer a read over TCP by a message that must not fail: where its send meets a
  connection that has just broken, UCX aborts the *owner* ("unexpected error: Endpoint timeout";
  read in its source, ucp/rma/rma_sw.c, and seen in 3 of some 1,500 kills of a peer at every state
  over TCP). Writes of host memory are zero-copy there and have no such answer (UCX_PROTO_INFO=y).
  So nothing is read over TCP unless the user asks for a pull.
- NIXL drops a peer's metadata by itself when the connection breaks, but not the connection:
  `remove_remote_agent` is still needed before the peer can be added again. It takes unknown names.
- The C++ side prints to stderr unless NIXL_LOG_LEVEL=FATAL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from connectors.nixl_api import descriptors, load_nixl, segment_of, translated
from connectors.nixl_environment import (
    backend,
    has_rdma,
    may_read,
    network_hint,
    reads_from,
    wants_progress_thread,
)
from connectors.nixl_lists import ListCache, UnitList, lists_pay
from kvxfer.errors import ConnectorError
from kvxfer.transfer.agent import Agent
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.agent_epoch import SETTLE_S
from kvxfer.transfer.connector import Direction, MemoryWindow, Where
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Int64Array, Region, RegionSet

logger = logging.getLogger(__name__)

_OWN = ""
"""What the lists of the agent's own memory go by; no peer's agent has an empty name."""
_WARM_BYTES = {"DRAM": 64, "VRAM": 64 * 1024}
"""What is read of each new region of a peer, by the kind of the local memory."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A posted handle, the lists it was made of, and what posting it said if that went wrong."""

    handle: Any
    agent: str
    used: tuple[UnitList, ...] = ()
    failure: str | None = None
    """No exception: what its traceback refers to, this and the agent, would live on in a cycle."""


class NixlAgent(Agent):
    """A NIXL agent with one backend, UCX by default, and one registration a region."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        self._segment = segment_of(memory.device)[0]
        self._name = name
        self._memory = memory
        self._plugin = backend()
        progress_thread = wants_progress_thread()
        self._api = load_nixl()
        with translated("agent"):
            config = self._api.nixl_agent_config(
                enable_prog_thread=progress_thread, backends=[self._plugin]
            )
            self._agent = self._api.nixl_agent(name, config)
        if self._plugin not in self._agent.backends:
            raise ConnectorError(f"NIXL has no {self._plugin} plugin that works here")
        self._own: set[Region] = set()
        self._reachable: RegionSet | None = None
        """`_own` in order, where it is known."""
        self._lists = ListCache(partial(_release_list, self._agent))
        self._scratch: Any = None
        self._warmed: set[str] = set()
        """Peers' agents that were read from."""

    def register(self, region: Region) -> tuple[Any, Region]:
        with translated("register_memory"):
            handle = self._agent.register_memory(self._ranges([region]), self._segment)
        self._own.add(region)
        self._reachable = None
        return handle, region

    def deregister(self, handle: tuple[Any, Region]) -> None:
        self._own.discard(handle[1])
        self._reachable = None
        self._lists.forget(_OWN)
        with translated("deregister_memory"):
            self._agent.deregister_memory(handle[0])

    def metadata(self, regions: Sequence[Region]) -> bytes:
        """Always with the connection, so that it serves a new peer and a known one alike."""
        with translated("get_partial_agent_metadata"):
            segment = self._agent.nixl_mems[self._segment]
            ranges = self._api.nixlBind.nixlRegDList(segment, self._ranges(regions))
            blob: bytes = self._agent.get_partial_agent_metadata(ranges, True, [self._plugin])
        return blob

    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        segment_of(remote.device)
        try:
            with translated(f"add_remote_agent of {remote.agent}"):
                loaded = self._agent.add_remote_agent(metadata)
        except ConnectorError as error:
            if remote.where is Where.HOST or "BACKEND" not in str(error):
                raise
            raise ConnectorError(f"{error}: {network_hint(os.environ)}") from error
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded != remote.agent:
            self.remove_peer(loaded)
            raise ConnectorError(f"description of agent {remote.agent} is that of {loaded}")
        self._know_peer(remote)

    def remove_peer(self, agent: str) -> None:
        self._lists.forget(agent)
        self._warmed.discard(agent)
        with translated("remove_remote_agent"):
            self._agent.remove_remote_agent(agent)

    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> _Transfer:
        push = direction is Direction.PUSH
        ours, theirs = plan.src_offsets, plan.dst_offsets
        if not push:
            ours, theirs = theirs, ours
        operation = "WRITE" if push else "READ"
        made = self._from_lists(operation, remote, ours, theirs, plan.sizes)
        if made is None:
            local = descriptors(self._memory.base_address, ours, plan.sizes, self._memory.device)
            far = descriptors(remote.base_address, theirs, plan.sizes, remote.device)
            made = self._from_rows(operation, remote, local, far)
        return self._post(made)

    def warm(self, remote: RemotePeer, regions: Sequence[Region]) -> _Transfer | None:
        """All into the same few bytes of our own, which mean nothing."""
        if not may_read(remote.where):
            return None
        if self._segment == "DRAM":  # there it is the connection that takes time, once
            if remote.agent in self._warmed:
                return None
            self._warmed.add(remote.agent)
            regions = regions[:1]
        size = _WARM_BYTES[self._segment]
        sizes = np.array([min(region.size, size) for region in regions], dtype=np.int64)
        offsets = np.array([region.offset for region in regions], dtype=np.int64)
        local = descriptors(self._scratch_address(size), offsets * 0, sizes, self._memory.device)
        far = descriptors(remote.base_address, offsets, sizes, remote.device)
        return self._post(self._from_rows("READ", remote, local, far))

    def progress(self) -> None:
        """Serves peers where there is no progress thread; notifications carry nothing of ours.
        What growth made lag behind is prepared anew, one list a call."""
        with translated("get_new_notifs"):
            self._agent.get_new_notifs()
        try:
            self._know_own()
            self._lists.refresh()
        except ConnectorError as error:
            logger.warning("agent %s: a prepared list is given up: %s", self._name, error)

    def _from_lists(
        self,
        operation: str,
        remote: RemotePeer,
        ours: Int64Array,
        theirs: Int64Array,
        sizes: Int64Array,
    ) -> _Transfer | None:
        """A handle made of prepared lists, where those pay."""
        if not lists_pay(len(sizes), max(len(self._own), len(remote.regions.regions))):
            return None
        self._know_own()
        self._know_peer(remote)
        with ExitStack() as undo:
            sides = []
            for name, offsets in ((_OWN, ours), (remote.agent, theirs)):
                side = self._lists.take(name, offsets, sizes)
                if side is None:
                    return None
                undo.callback(self._lists.give_back, side.units)
                sides.append(side)
            local, far = sides
            with translated(f"make_prepped_xfer with {remote.agent}"):
                handle = self._agent.make_prepped_xfer(
                    operation, local.units.handle, local.indices, far.units.handle, far.indices
                )
            undo.pop_all()
        return _Transfer(handle, remote.agent, (local.units, far.units))

    def _from_rows(
        self, operation: str, remote: RemotePeer, local: Int64Array, far: Int64Array
    ) -> _Transfer:
        with translated(f"initialize_xfer with {remote.agent}"):
            here = self._agent.get_xfer_descs(local, self._segment)
            there = self._agent.get_xfer_descs(far, segment_of(remote.device)[0])
            if here is None or there is None:
                raise ConnectorError("NIXL did not understand the descriptors of a plan")
            handle = self._agent.initialize_xfer(operation, here, there, remote.agent)
        return _Transfer(handle, remote.agent)

    def _post(self, made: _Transfer) -> _Transfer:
        try:
            with translated(f"transfer with {made.agent}"):
                self._agent.transfer(made.handle)  # check_xfer_state will repeat its answer
        except ConnectorError as failure:
            return replace(made, failure=str(failure))  # some runs may have moved
        return made

    def is_finished(self, handle: _Transfer) -> bool:
        try:
            if handle.failure is not None:
                raise ConnectorError(handle.failure)
            with translated("check_xfer_state"):
                state = self._agent.check_xfer_state(handle.handle)
            if state not in ("DONE", "PROC"):
                raise ConnectorError(f"NIXL ended a transfer in state {state}")
        except ConnectorError:
            self._lists.forget(handle.agent)  # NIXL may have dropped what they refer to
            self._release(handle)
            raise
        if state == "PROC":
            return False
        self._release(handle)
        return True

    def _release(self, ended: _Transfer) -> None:
        for units in ended.used:
            self._lists.give_back(units)
        with translated("release_xfer_handle"):
            self._agent.release_xfer_handle(ended.handle)

    def _know_own(self) -> None:
        if self._reachable is None:
            self._reachable = RegionSet(tuple(sorted(self._own)))
        base, device = self._memory.base_address, self._memory.device
        self._lists.know(_OWN, self._reachable, partial(_prepare, self._agent, _OWN, base, device))

    def _know_peer(self, remote: RemotePeer) -> None:
        base, device = remote.base_address, remote.device
        prepare = partial(_prepare, self._agent, remote.agent, base, device)
        self._lists.know(remote.agent, remote.regions, prepare)

    def _scratch_address(self, size_bytes: int) -> int:
        """Of registered memory of our own, on the device that our memory is on."""
        if self._scratch is None:
            import torch

            self._scratch = torch.zeros(size_bytes, dtype=torch.uint8, device=self._memory.device)
            address = np.array([0], dtype=np.int64)
            rows = descriptors(
                self._scratch.data_ptr(), address, address + size_bytes, self._memory.device
            )
            with translated("register_memory of scratch memory"):
                self._agent.register_memory(rows, self._segment)
        return int(self._scratch.data_ptr())

    def _ranges(self, regions: Sequence[Region]) -> Int64Array:
        offsets = np.array([region.offset for region in regions], dtype=np.int64)
        sizes = np.array([region.size for region in regions], dtype=np.int64)
        return descriptors(self._memory.base_address, offsets, sizes, self._memory.device)


# No methods of NixlAgent: its lists would hold it in a cycle, and agents end when they are dropped.
def _release_list(nixl_agent: Any, handle: Any) -> None:
    with translated("release_dlist_handle"):
        nixl_agent.release_dlist_handle(handle)


def _prepare(nixl_agent: Any, agent: str, base: int, device: str, places: Int64Array) -> Any:
    segment, index = segment_of(device)
    rows = np.empty((len(places), 5), dtype=np.int64)
    rows[:, [0, 1, 3, 4]] = places
    rows[:, 0] += base
    rows[:, 2] = index
    with translated(f"prep_xfer_dlist of {agent or 'own memory'}"):
        return nixl_agent.prep_xfer_dlist(agent, rows, segment)


class NixlConnector(AgentConnector):
    """Moves bytes with NIXL."""

    agent_class = NixlAgent
    settle_s = SETTLE_S
    preferred_layout = "LBHNC"  # vLLM's NixlConnector asks for heads outside tokens, too

    @property
    def reads_from(self) -> frozenset[Where]:
        return reads_from(os.environ, has_rdma())

    def knows_ahead(self, remote: RemotePeer) -> bool:
        """At one of the two ends, the one that is likely to start transfers (`agent_epoch` says
        why): decode where it may read, else prefill."""
        if self.initiates is None:
            return True
        pulls = Direction.PULL in self.expects and (
            may_read(remote.where) or Direction.PUSH not in self.expects
        )
        return self.initiates is (Direction.PULL if pulls else Direction.PUSH)


CONNECTOR = NixlConnector
