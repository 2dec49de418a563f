"""KV transfer for engines that bring their own workers: one object over one cache.

    A (owner of the source)                  B (owner of the destination)
    register()                               register()
    describe("B") ──────── blob ───────────▶ connect("A", blob)
    connect("B", blob) ◀── blob ──────────── describe("A")
    push("B", blocks here, blocks there)     or pull("A", blocks there, blocks here)
                                             grow(4096)
    apply("B", blob) ◀──── blob ──────────── update()
    ───── acknowledgement ─────────────────▶ acknowledge("A", …): its new blocks may be named now
                                             revoke(1024)
    apply("B", blob) ◀──── blob ──────────── …
    ───── acknowledgement ─────────────────▶ acknowledge("A", …), then release()
    disconnect("B") ─ acknowledgement ─────▶ acknowledge("A", …), then close()

How blobs travel, which blocks hold what, and when a peer is dead, is the engine's business. So are
peers' names; each is one process at a time.

**Threads**: the one that made an endpoint makes every call (TransferError otherwise), as transports
ask for. Poll it every few milliseconds while a peer may be transferring: some serve peers then.
**Blocks** of a transfer are in use until its ticket is done; there is no cancel. On a GPU, whoever
wrote the source has synchronised before `push`, and tells its peer before that one may `pull`.
**Errors** are those of `kvxfer.errors`; a call that raises has changed nothing unless it says so.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Unpack

import torch

from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import KvxferError, TransferError, UsageError
from kvxfer.memory.limits import host_identity
from kvxfer.transfer.connector import Direction, load_connectors
from kvxfer.transfer.endpoint_existing import ExistingCache
from kvxfer.transfer.endpoint_memory import EndpointMemory, GrowableCache
from kvxfer.transfer.endpoint_messages import (
    Acknowledgement,
    Announcement,
    HeadShard,
    decode,
    decode_change,
    encode,
    resolve_shards,
)
from kvxfer.transfer.endpoint_own import OwnMemory
from kvxfer.transfer.endpoint_remotes import Remotes
from kvxfer.transfer.endpoint_tickets import Ticket
from kvxfer.transfer.endpoint_transfers import Options, Transfers
from kvxfer.transfer.lanes import AUTO, Lane, LaneSide, offered
from kvxfer.transfer.multi import MultiConnector

__all__ = ["Endpoint", "ExistingCache", "GrowableCache", "HeadShard", "Ticket"]

_ABANDONED: list[object] = []  # memory that a transfer may still use, kept from the collector


class Endpoint:
    """A cache, the connectors over it, and its peers. Owns all of them; a context manager."""

    def __init__(
        self,
        name: str,
        cache: EndpointMemory,
        connectors: Sequence[str] | None = None,
        shards: Sequence[HeadShard] | None = None,
    ) -> None:
        """`connectors`: modules of connectors/, default `cache.connectors`. `shards`: which heads
        of the model the cache has, group by group; default: all there are.

        Raises UsageError, or ConnectorError where a transport does not start; `cache` is then still
        the caller's.
        """
        geometry, window = cache.geometry, cache.window
        self.name = name
        self._thread = threading.get_ident()
        shards = resolve_shards(geometry, shards)
        names = ",".join(cache.connectors if connectors is None else connectors)
        if "peer" in names.split(",") and window.buffer is None:
            raise UsageError("connectors", names, "peer maps growable memory; nixl takes any")
        agent = f"{name}.{secrets.token_hex(4)}"
        # All of them pull; one that also pushes does so over the same connection.
        connector = MultiConnector.open(load_connectors(names), agent, window, Direction.PULL)
        self._connector = connector
        offers = tuple(offered(connector.connectors, AUTO))
        lanes = LaneSide(offers, host_identity(), window.device)
        self._memory = OwnMemory(name, cache, connector, agent, shards, lanes)
        self._remotes = Remotes(
            connector, geometry, shards, lanes, lambda peer: self._transfers.num_with(peer)
        )
        self._transfers = Transfers(connector, self._memory, self._remotes)
        self._is_closed = False

    @classmethod
    def create(
        cls,
        name: str,
        *,
        device: str,
        specs: Sequence[KVCacheSpec],
        layouts: Sequence[KVCacheLayout],
        capacity_blocks: Sequence[int],
        initial_blocks: Sequence[int],
        connectors: Sequence[str] | None = None,
        shards: Sequence[HeadShard] | None = None,
    ) -> Endpoint:
        """Over a growable cache of its own: addresses for `capacity_blocks` of each group, memory
        for `initial_blocks`, the null block included. Each list has an entry a group."""
        cache = GrowableCache.create(device, specs, layouts, capacity_blocks, initial_blocks)
        try:
            return cls(name, cache, connectors, shards)
        except BaseException:
            cache.close([])
            raise

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def geometry(self) -> CacheGeometry:
        return self._memory.memory.geometry

    @property
    def views(self) -> list[list[torch.Tensor]]:
        """By group, one [capacity_blocks, H, N, C] per layer, C = K then V; valid through growth.
        Touching a block that is not committed is a fault, and so is any use after `close`."""
        return self._own.memory.views

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group that may be used, the null block included: what is committed, or,
        between `revoke` and `release`, what will be."""
        return self._own.num_blocks

    def register(self) -> None:
        """Make what is committed reachable, and nothing else; all of it, or ConnectorError."""
        self._own.register()

    def grow(self, *num_blocks: int) -> None:
        """Commit and register at least so many blocks, group by group; both or neither. Then give
        `update` to the peers. Raises CapacityExceeded, DriverError, ConnectorError; CacheError for
        tensors that the engine brought."""
        self._own.grow(num_blocks)

    def update(self) -> bytes:
        """For each peer's `apply`: what some peer has not acknowledged. May be told again, and
        makes up for one that was lost; from `revoke` to `release` it is what `revoke` returned."""
        return encode(self._own.update())

    def revoke(self, *num_blocks: int) -> bytes:
        """Stop using what lies above so many blocks, group by group: for each peer's `apply`. Its
        memory goes with `release`.

        Raises BlocksInUse while tickets of ours touch blocks above (peers wait for theirs before
        they acknowledge), CacheError where nothing would be freed: chunks stay or go whole.
        """
        self._transfers.check_unused(self._own.going(num_blocks))
        return encode(self._own.revoke(num_blocks))

    def release(self) -> int:
        """Give back the memory that was revoked; returns how many bytes.

        Raises MemoryPinned, and nothing has changed, while a peer that may reach it has not
        acknowledged: wait for that, or `fence` one whose process has ended.
        """
        return self._own.release()

    def check_conservation(self) -> None:
        """Raise RegionError unless what is registered, or revoked and waiting for `release`, is
        exactly what is committed."""
        self._own.check()

    def describe(self, peer: str) -> bytes:
        """For the `connect` of one peer, once: it holds a one-time right, for a minute. From now on
        `peer` counts as one that may reach our memory."""
        return encode(self._own.describe(peer))

    def connect(self, peer: str, blob: bytes) -> list[Lane]:
        """Learn how to reach `peer`, from its `describe`; returns the lanes that we may start, best
        first as far as that is known without trying. A new process of that name replaces the old.

        Raises WireError for damaged bytes, HandshakeRejected, which names the field, where KV
        cannot flow between the two, ConnectorError where no transport reaches it.
        """
        self._check()
        return self._remotes.connect(peer, decode(blob, Announcement))

    def apply(self, peer: str, blob: bytes) -> bytes:
        """Take in a peer's `update` or `revoke`; returns the acknowledgement. Old news is
        acknowledged again.

        Raises WireError for damaged bytes, or where something in between is missing; TransferError
        for a revocation while tickets with the peer are under way; ConnectorError where a transport
        fails to let go of what was revoked: the peer is not connected any more then.
        """
        self._check()
        return encode(self._remotes.apply(peer, decode_change(blob)))

    def acknowledge(self, peer: str, blob: bytes) -> None:
        """What `apply` or `disconnect` returned at `peer`. Raises WireError, TransferError."""
        self._own.acknowledged(peer, decode(blob, Acknowledgement))

    def has_acknowledged(self, peer: str) -> bool:
        """Whether `peer` has in force all that we told up to now, or cannot reach us at all."""
        return self._own.has_acknowledged(peer)

    def disconnect(self, peer: str) -> bytes:
        """Forget a peer; returns the acknowledgement that nothing here touches its memory any more.
        Raises TransferError while tickets with it are under way; ConnectorError where a transport
        does not let go within 5 s: there is no acknowledgement then."""
        self._check()
        return encode(self._remotes.disconnect(peer, self.poll))

    def fence(self, peer: str) -> None:
        """The engine's word that the process of `peer` has ended: it reaches nothing any more, and
        our tickets with it end in an error as soon as the transport has noticed."""
        self._own.holders.forget(peer)
        self._remotes.forget(peer)

    def push(
        self,
        peer: str,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        tokens: range | None = None,
        layers: range | None = None,
        **options: Unpack[Options],
    ) -> Ticket:
        """Copy KV from our blocks to `peer`'s. Both lists are a request's block table from its
        token 0 on, in blocks of each side's own size.

        `tokens` are positions in the request; left out, both lists hold equally many. `layers`
        count within the group. `options`: group, heads, lane (`Options` says what they mean).

        Raises PlanError for blocks, tokens, layers or heads that are not there, RegionError for
        blocks outside the committed ranges, TransferError for an unknown peer or lane,
        ConnectorError from the transport. Nothing has moved then.
        """
        self._check()
        blocks, what = (src_blocks, dst_blocks), (tokens, layers)
        return self._transfers.start(Direction.PUSH, peer, blocks, what, options)

    def pull(
        self,
        peer: str,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        tokens: range | None = None,
        layers: range | None = None,
        **options: Unpack[Options],
    ) -> Ticket:
        """Copy KV from `peer`'s blocks to ours; all else as `push`."""
        self._check()
        blocks, what = (src_blocks, dst_blocks), (tokens, layers)
        return self._transfers.start(Direction.PULL, peer, blocks, what, options)

    def poll(self) -> list[Ticket]:
        """Advance everything, requests of peers included; the tickets that are done now."""
        self._check()
        return self._transfers.poll()

    def close(self) -> None:
        """Give everything back; waits up to 5 s for transfers under way. Idempotent.

        Peers that were described to and have not acknowledged a `disconnect` may still reach our
        addresses, so those stay taken (a warning names the peers). Raises ConnectorError where
        transfers did not end: all memory stays then.
        """
        if self._is_closed:
            return
        self._check()
        self._is_closed = True
        try:
            self._memory.deregister()
            self._connector.close()
        except KvxferError:
            _ABANDONED.append(self._memory)
            raise
        finally:
            self._transfers.abandon(f"endpoint {self.name} was closed")
        self._memory.memory.close(list(self._memory.holders))

    @property
    def _own(self) -> OwnMemory:
        self._check()
        return self._memory

    def _check(self) -> None:
        if self._is_closed:
            raise TransferError(f"endpoint {self.name} is closed")
        if threading.get_ident() != self._thread:
            raise TransferError(f"endpoint {self.name}: only the thread that made it may use it")
