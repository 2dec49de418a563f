"""What connectors take of a device, measured on memory that is given back."""

from __future__ import annotations

from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.usage import UsageMeter
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.multi import MultiConnector

SCRATCH_BYTES = 8 << 20
"""On either side of a transfer that only shows what transfers take."""


def transfer_bytes(
    connector: MultiConnector, driver: VmmDriver, meter: UsageMeter, before: int
) -> int:
    """What the connectors take of the device when they move something; `before` was used before
    they were made. Tried on scratch memory of the cache's kind."""
    size = -(-SCRATCH_BYTES // driver.granularity) * driver.granularity
    with VirtualBuffer(driver, 2 * size) as buffer:
        buffer.commit([(0, 2 * size)])
        scratch = MemoryWindow(buffer.base_address, 2 * size, driver.device)
        with connector.exercise(scratch):
            used = meter.used_bytes(2 * size)
    return max(0, used - before)
