"""One end of a transfer over growable memory; as a program, the other end, which serves its peers.

    python growable_end.py <connector> <device> <agent name> <bytes> <seed>

It prints one line of JSON and ends with its standard input.
"""

from __future__ import annotations

import json
import select
import sys

import torch

from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.extensible_tensor import tensor_over
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import Connector, MemoryWindow, load_connector
from kvxfer.transfer.regions import Region


def driver_of(device: str) -> VmmDriver:
    if device == "cpu":
        from kvxfer.memory.host import HostDriver

        return HostDriver()
    from kvxfer.memory.cuda import CudaDriver

    return CudaDriver(int(device.removeprefix("cuda:")))


def pattern(size_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


class End:
    """A committed buffer full of its seed's pattern, all of it registered, chunk by chunk."""

    def __init__(self, connector: str, device: str, name: str, size_bytes: int, seed: int) -> None:
        self.buffer = VirtualBuffer(driver_of(device), size_bytes)
        chunks = self.buffer.commit([(0, size_bytes)])
        base = self.buffer.base_address
        self.bytes = tensor_over(base, size_bytes, device)
        self.bytes.copy_(pattern(size_bytes, seed))
        if device != "cpu":
            torch.cuda.synchronize(device)
        self.regions = [Region(chunk.offset, chunk.size) for chunk in chunks]
        window = MemoryWindow(base, size_bytes, device, self.buffer)
        self.connector: Connector = load_connector(connector)(name, window)
        self.connector.register(self.regions)

    def close(self) -> None:
        self.connector.close()
        self.buffer.close()


def main(connector: str, device: str, name: str, size_bytes: int, seed: int) -> None:
    end = End(connector, device, name, size_bytes, seed)
    description = end.connector.describe(end.regions).hex()
    ready = {"base": end.buffer.base_address, "description": description}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    while not select.select([0], [], [], 0.0002 if device == "cpu" else 0)[0]:
        end.connector.poll()
    end.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))
