"""What one rank has moved since it was last asked."""

from __future__ import annotations

from typing import Any

from kvxfer.transfer.endpoint import Ticket

DURATION, BYTES, DESCRIPTORS, FAILED = (
    "transfer_duration",
    "bytes_transferred",
    "num_descriptors",
    "num_failed_transfers",
)
"""Keys of what `take` returns: seconds, bytes and descriptors of each transfer, and how many
transfers failed, each a list."""
KEYS = (DURATION, BYTES, DESCRIPTORS, FAILED)


class Stats:
    """One thread adds; another may `take`."""

    def __init__(self) -> None:
        self._data = new_data()

    def ended(self, ticket: Ticket, seconds: float) -> None:
        if ticket.error is not None:
            self._data[FAILED].append(1)
            return
        self._data[DURATION].append(seconds)
        self._data[BYTES].append(ticket.num_bytes)
        self._data[DESCRIPTORS].append(ticket.num_descriptors)

    def take(self) -> dict[str, list[Any]] | None:
        """What there was since the last time; None: nothing."""
        if not any(self._data.values()):
            return None
        data, self._data = self._data, new_data()
        return data


def new_data() -> dict[str, list[Any]]:
    return {key: [] for key in KEYS}
