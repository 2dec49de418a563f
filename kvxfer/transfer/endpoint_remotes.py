"""An endpoint's other half: the peers whose memory it may reach, and how."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvxfer.cache.layout import CacheGeometry
from kvxfer.errors import ConnectorError, TransferError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.endpoint_messages import (
    Acknowledgement,
    Announcement,
    Growth,
    HeadShard,
    Revocation,
    check_same_kv,
)
from kvxfer.transfer.endpoint_peers import Remote
from kvxfer.transfer.endpoint_tickets import POLL_INTERVAL_S, BlockSide
from kvxfer.transfer.lanes import Lane, LaneSide, candidates
from kvxfer.transfer.multi import MultiConnector

DISCONNECT_TIMEOUT_S = 5.0


class Remotes:
    """Contracts as `Endpoint`'s methods'. `num_under_way`: of our tickets with a peer."""

    def __init__(
        self,
        connector: MultiConnector,
        geometry: CacheGeometry,
        shards: Sequence[HeadShard],
        lanes: LaneSide,
        num_under_way: Callable[[str], int],
    ) -> None:
        self._connector = connector
        self._geometry = geometry
        self._shards = shards
        self._lanes = lanes
        self._num_under_way = num_under_way
        self._remotes: dict[str, Remote] = {}

    def require(self, peer: str) -> Remote:
        remote = self._remotes.get(peer)
        if remote is None:
            raise TransferError(f"peer {peer} is not connected")
        return remote

    def connect(self, peer: str, facts: Announcement) -> list[Lane]:
        check_same_kv(self._geometry, self._shards, facts.geometry, facts.shards)
        theirs = LaneSide(tuple(map(Lane.parse, facts.lanes)), facts.host, facts.device)
        found = candidates(self._lanes, theirs)
        if peer in self._remotes:
            self._remotes[peer].check_again(peer, facts)
        reached = self._connector.connect(
            peer, facts.base_address, facts.description, facts.invitation
        )
        lanes = [lane for lane in found if lane.connector in reached]
        self._remotes[peer] = Remote.of(facts, lanes)
        return lanes

    def apply(self, peer: str, told: Growth | Revocation) -> Acknowledgement:
        remote = self.require(peer)
        if isinstance(told, Growth):
            learnt = remote.grown(peer, told)
            if learnt is not None:
                address = remote.facts.base_address
                self._connector.connect(peer, address, told.description)
        else:
            learnt = remote.shrunk(peer, told)
            if learnt is not None:
                self._let_go(peer, remote, told.description)
        self._remotes[peer] = learnt or remote
        return self._remotes[peer].acknowledgement()

    def disconnect(self, peer: str, poll: Callable[[], object]) -> Acknowledgement:
        remote = self.require(peer)
        self._check_idle(peer)
        self.forget(peer)
        deadline_s = time.monotonic() + DISCONNECT_TIMEOUT_S
        while self._connector.is_leaving(remote.facts.agent):  # a transport reads ahead of use
            if time.monotonic() > deadline_s:
                raise ConnectorError(f"peer {peer}: a read of its memory did not end")
            poll()
            time.sleep(POLL_INTERVAL_S)
        return remote.acknowledgement(has_left=True)

    def forget(self, peer: str) -> None:
        self._remotes.pop(peer, None)
        self._connector.disconnect(peer)

    def side(self, peer: str, group: int) -> BlockSide:
        remote = self.require(peer)
        facts = remote.facts
        return BlockSide(
            f"peer {peer}",
            facts.geometry.groups[group],
            remote.regions,
            facts.shards[group],
            facts.first_block,
        )

    def lane(self, peer: str, direction: Direction, asked: Lane | None) -> Lane:
        """The best of that direction, or the one that was asked for, if it is one of them."""
        lanes = [lane for lane in self.require(peer).lanes if lane.direction is direction]
        if asked is None and lanes:
            return lanes[0]
        if asked is None or asked not in lanes:
            have = ", ".join(map(str, self.require(peer).lanes))
            wanted = asked or f"*/{direction}"
            raise TransferError(f"lane {wanted}: none such to peer {peer}, there are: {have}")
        return asked

    def _let_go(self, peer: str, remote: Remote, description: bytes) -> None:
        """Nothing of ours touches what `description` does not name, once this returns."""
        self._check_idle(peer)
        try:
            self._connector.renew(peer, remote.facts.base_address, description)
        except ConnectorError:
            self.forget(peer)
            raise

    def _check_idle(self, peer: str) -> None:
        under_way = self._num_under_way(peer)
        if under_way:
            raise TransferError(f"peer {peer}: {under_way} transfers are under way: wait for them")
