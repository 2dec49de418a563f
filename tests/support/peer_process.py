"""A process with a connector over growable memory, for the tests of `peer` and of stale peers.

Each line of standard input is a command, a JSON list of its name and arguments; each is answered
by one line of JSON. It ends with its input, and polls until then.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import Direction, MemoryWindow, load_connector
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

DEADLINE_S = 20.0


def pattern(seed: int, offset: int, size: int) -> np.ndarray:
    """What the owner with this seed writes into a chunk."""
    return np.random.default_rng([seed, offset]).integers(0, 256, size, dtype=np.uint8)


def plan_of(runs: list[list[int]]) -> TransferPlan:
    """Runs are (source offset, destination offset, size)."""
    columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return TransferPlan.of_runs(*(column.copy() for column in columns))


class Process:
    """The commands are its public methods."""

    def __init__(
        self, agent_name: str, size_bytes: int, seed: int, device: str, connector: str
    ) -> None:
        self._seed = seed
        self._buffer = VirtualBuffer(driver_of(device), size_bytes)
        base = self._buffer.base_address
        if device != "cpu":
            import torch

            torch.zeros(1, device=device)  # a context is current in this thread before a transport
        window = MemoryWindow(base, size_bytes, device, self._buffer)
        self._connector: Any = load_connector(connector)(agent_name, window)

    def poll(self) -> None:
        self._connector.poll()

    def facts(self) -> dict[str, Any]:
        return {
            "base": self._buffer.base_address,
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "pid": os.getpid(),
            "free_bytes": self._buffer.driver.memory_info().free_bytes,
            "refused": list(getattr(self._buffer.driver, "refused", ())),
            "namespaces": [
                str(Path(f"/proc/self/ns/{kind}").readlink())
                for kind in ("pid", "net", "ipc", "mnt")
            ],
        }

    def grow(self, *ranges: list[int]) -> str:
        """Commit (offset, size) each, fill, register; the description of what is new."""
        chunks = [chunk for one in ranges for chunk in self._buffer.commit([(one[0], one[1])])]
        for chunk in chunks:
            self._write(chunk.offset, pattern(self._seed, chunk.offset, chunk.size))
        regions = [Region(chunk.offset, chunk.size) for chunk in chunks]
        self._connector.register(regions)
        return self._connector.describe(regions).hex()

    def describe(self) -> str:
        regions = [Region(chunk.offset, chunk.size) for chunk in self._buffer.chunks]
        return self._connector.describe(regions).hex()

    def describe_below(self, offset: int) -> str:
        chunks = [chunk for chunk in self._buffer.chunks if chunk.offset < offset]
        return self._connector.describe([Region(c.offset, c.size) for c in chunks]).hex()

    def shrink(self, offset: int) -> str:
        """Deregister and release what lies from `offset` on; the description of the rest."""
        doomed = [chunk for chunk in self._buffer.chunks if chunk.offset >= offset]
        self._connector.deregister([Region(chunk.offset, chunk.size) for chunk in doomed])
        self._buffer.decommit(doomed)
        return self.describe()

    def fill(self) -> None:
        """All of its own memory anew: what it pulled is gone."""
        for chunk in self._buffer.chunks:
            self._write(chunk.offset, pattern(self._seed, chunk.offset, chunk.size))

    def retire(self, offset: int) -> None:
        """`shrink` while a lost peer may still reach what goes."""
        doomed = [chunk for chunk in self._buffer.chunks if chunk.offset >= offset]
        self._connector.deregister([Region(chunk.offset, chunk.size) for chunk in doomed])
        self._buffer.retire(doomed)

    def bury(self) -> None:
        self._buffer.bury()

    def memory(self) -> dict[str, int]:
        """Bytes."""
        return {
            "committed": sum(chunk.size for chunk in self._buffer.chunks),
            "pinned": sum(chunk.size for chunk in self._buffer.pinned),
            "tombstones": sum(tomb.size for tomb in self._buffer.tombstones),
            "free": self._buffer.driver.memory_info().free_bytes,
        }

    def invite(self) -> str:
        return self._connector.invite().hex()

    def connect(self, peer: str, base: int, description: str, invitation: str) -> None:
        told = bytes.fromhex(description), bytes.fromhex(invitation)
        self._connector.connect(peer, base, *told)

    def renew(self, peer: str, base: int, description: str) -> None:
        self._connector.renew(peer, base, bytes.fromhex(description))

    def is_lost(self, agent: str) -> bool:
        return self._connector._peer_agent().has_lost(agent)

    def start(self, peer: str, runs: list[list[int]], way: str = "pull") -> int:
        ticket: int = self._connector.submit(peer, Direction(way), plan_of(runs))
        return ticket

    def pull(self, peer: str, runs: list[list[int]]) -> str | None:
        return self.move(peer, runs, "pull")

    def move(self, peer: str, runs: list[list[int]], way: str) -> str | None:
        """What went wrong, if anything."""
        ticket = self.start(peer, runs, way)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for result in self._connector.poll():
                if result.ticket == ticket:
                    error: str | None = result.error
                    return error
            time.sleep(0.0002)
        return f"no end in {DEADLINE_S:g} s"

    def digest(self, offset: int, size: int) -> str:
        return hashlib.blake2b(self._read(offset, size)).hexdigest()

    def scribble(self, agent: str) -> None:
        """Write into the pages of a peer on a GPU, where the driver lets us."""
        import torch

        from kvxfer.memory.extensible_tensor import tensor_over

        link = self._connector._peer_agent()._links[agent]
        tensor_over(link.base_address, 4096, self._buffer.device).fill_(1)
        torch.cuda.synchronize(self._buffer.device)

    def close(self) -> None:
        self._connector.close()
        self._buffer.close()

    def _write(self, offset: int, data: np.ndarray) -> None:
        address = self._buffer.base_address + offset
        if self._buffer.device == "cpu":
            ctypes.memmove(address, data.ctypes.data, len(data))
        else:
            import torch

            from kvxfer.memory.extensible_tensor import tensor_over

            target = tensor_over(address, len(data), self._buffer.device)
            target.copy_(torch.from_numpy(data))
            torch.cuda.synchronize(self._buffer.device)

    def _read(self, offset: int, size: int) -> bytes:
        address = self._buffer.base_address + offset
        if self._buffer.device == "cpu":
            return ctypes.string_at(address, size)
        from kvxfer.memory.extensible_tensor import tensor_over

        return tensor_over(address, size, self._buffer.device).cpu().numpy().tobytes()


def driver_of(device: str) -> VmmDriver:
    if device == "cpu":
        return HostDriver()
    from kvxfer.memory.cuda import CudaDriver

    return CudaDriver(int(device.removeprefix("cuda:")))


def main(agent_name: str, size_bytes: int, seed: int, device: str, connector: str) -> None:
    process = Process(agent_name, size_bytes, seed, device, connector)
    while True:
        process.poll()
        if not select.select([sys.stdin], [], [], 0.0005)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            break
        name, *arguments = json.loads(line)
        try:
            answer = {"answer": getattr(process, name)(*arguments)}
        except KvxferError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if name == "close":
            return
    process.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
