"""A process that shrinks its cache while a stale peer knows it, for test_stale_peer.py.

Each line of standard input is a command; each is answered by one line of JSON. It ends with its
input, and serves its peers by NIXL until then.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

from connectors.nixl import NixlConnector
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.memory.host import HostDriver
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region

SPEC = KVCacheSpec(2, 2, 64, 64, "float32", 16)
"""32 KiB a block."""
KEPT_BLOCKS = 4


class Owner:
    def __init__(self, agent_name: str) -> None:
        geometry = CacheGeometry.build([SPEC], [KVCacheLayout.BLHNC], [64], 64 * 1024)
        self.cache = KVCache(HostDriver(64 * 1024), geometry)
        for bound in (KEPT_BLOCKS, 64):
            self.cache.extend([bound])
        for view in self.cache.views[0]:
            view.fill_(1.0)
        base = self.cache.buffer.base_address
        window = MemoryWindow(base, geometry.total_bytes, "cpu")
        self.connector = NixlConnector(agent_name, window)
        self.connector.register(self.regions())

    def regions(self) -> list[Region]:
        return [Region(chunk.offset, chunk.size) for chunk in self.cache.buffer.chunks]

    def answer(self, command: str) -> dict[str, Any]:
        if command == "describe":
            regions = self.regions()
            return {
                "base": self.cache.buffer.base_address,
                "size": self.cache.reserved_bytes,
                "regions": [(region.offset, region.size) for region in regions],
                "description": self.connector.describe(regions).hex(),
            }
        if command in ("retire", "decommit"):
            gone = [Region(c.offset, c.size) for c in self.cache.above([KEPT_BLOCKS])]
            self.connector.deregister(gone)
            self.cache.shrink([KEPT_BLOCKS], is_reachable=command == "retire")
        elif command == "extend":
            self.cache.extend([64])
        (bound,) = self.cache.committed_blocks
        return {
            "blocks": bound,
            "tombstones": sum(tomb.size for tomb in self.cache.buffer.tombstones),
            "kept": all(bool((view[:KEPT_BLOCKS] == 1.0).all()) for view in self.cache.views[0]),
            "rest_sum": sum(float(view[KEPT_BLOCKS:bound].sum()) for view in self.cache.views[0]),
        }


def main(agent_name: str) -> None:
    owner = Owner(agent_name)
    while True:
        owner.connector.poll()
        if not select.select([sys.stdin], [], [], 0.0005)[0]:
            continue
        command = sys.stdin.readline().strip()
        if not command:
            break
        sys.stdout.write(json.dumps(owner.answer(command)) + "\n")
        sys.stdout.flush()
    owner.connector.close()
    owner.cache.close()


if __name__ == "__main__":
    main(sys.argv[1])
