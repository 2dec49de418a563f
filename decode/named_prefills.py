"""Which prefill workers a decode worker works with, as routers tell it.

| while                                 | these count                                       |
| ---                                   | ---                                               |
| no router has named any               | those of `--prefill`                              |
| a router that named some lives        | all that such routers name, and nobody else       |
| none of them lives any more           | as before: a router's loss changes nothing        |

One that is named no longer is asked for nothing new; it is left once nothing is under way with it,
which for blocks that it may still write to is its word that it ended, or its next process: as
everywhere, without a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvxfer.control.router_messages import Prefills
from kvxfer.control.session import Peer
from kvxfer.errors import WireError
from kvxfer.worker.peers import PeerTable

logger = logging.getLogger(__name__)

MAX_PREFILLS = 256
"""Named by all routers together: each costs a connection."""


class NamedPrefills:
    """Control thread only. `is_under_way`: whether anything is with a prefill worker."""

    def __init__(self, peers: PeerTable, is_under_way: Callable[[Peer], bool]) -> None:
        self._peers = peers
        self._is_under_way = is_under_way
        self._lists: dict[str, frozenset[str]] = {}
        """By router, keys of those that it names."""
        self.handlers: dict[type, Callable[[str, Any], None]] = {Prefills: self._on_prefills}

    def _on_prefills(self, router: str, message: Prefills) -> None:
        """Raises WireError or UsageError, and changes nothing, for a list that cannot be."""
        self._peers.require_router(router)
        if len(message.addresses) > MAX_PREFILLS:
            raise WireError(f"Prefills of {len(message.addresses)}: {MAX_PREFILLS} at the most")
        named = frozenset(f"out:{address}" for address in message.addresses)
        if named == self._lists.get(router):
            return
        if len(named.union(*self._lists.values())) > MAX_PREFILLS:
            raise WireError(f"Prefills: more than {MAX_PREFILLS} with those of other routers")
        for address in message.addresses:
            self._peers.check_dial("addresses", address)
        self._lists[router] = named
        self._apply()

    def lost(self, peer: Peer) -> None:
        """A router's list goes with it, but for the last one."""
        if self._lists.pop(peer.key, None) is not None and self._lists:
            self._apply()

    def _apply(self) -> None:
        self._peers.may_find_others = True
        wanted = frozenset[str]().union(*self._lists.values())
        for peer in self._peers.dialled():
            peer.is_unwanted = peer.key not in wanted
        for key in sorted(wanted):
            if self._peers.get(key) is None:
                self._peers.dial(key.removeprefix("out:"))

    def tick(self) -> None:
        """Leave those that are to be left and can be."""
        for peer in self._peers.dialled():
            if peer.is_unwanted and not self._is_under_way(peer):
                logger.info("prefill worker %s is named by no router any more", peer.name)
                self._peers.forget(peer.key, "no router names you any more")
