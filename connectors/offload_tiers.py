"""The tiers that a process has, by environment variables."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from connectors.offload_slots import SlotFile
from connectors.offload_store import BlockStore
from connectors.offload_wire import MAX_SLOT_BYTES
from kvxfer.errors import UsageError

DIRECTORY: Final = "KVXFER_OFFLOAD_DIR"
"""Where the disk tier is; without it there is none."""
HOST_MIB: Final = "KVXFER_OFFLOAD_HOST_MIB"
"""Of the host tier, 0: none. Default 64."""
DISK_MIB: Final = "KVXFER_OFFLOAD_DISK_MIB"
"""Of the disk tier. Default 1024."""
BLOCK_KIB: Final = "KVXFER_OFFLOAD_BLOCK_KIB"
"""Of the longest block. Default 1024."""
WHOSE: Final = "KVXFER_OFFLOAD_NAME"
"""Model, geometry and layout whose blocks a directory may hold, where keys do not say so."""

MAX_PLACES: Final = 64


def open_tiers() -> BlockStore:
    """Raises UsageError, naming the variable, for values that are none, and where `DIRECTORY`
    cannot be used."""
    slot_bytes = _number(BLOCK_KIB, 1024, 1, MAX_SLOT_BYTES >> 10) << 10
    host_slots = (_number(HOST_MIB, 64, 0, 1 << 30) << 20) // slot_bytes
    disk_slots = (_number(DISK_MIB, 1024, 1, 1 << 30) << 20) // slot_bytes
    directory = os.environ.get(DIRECTORY, "")
    with ExitStack() as undo:
        files = []
        if host_slots:
            files.append(SlotFile.in_memory(slot_bytes, host_slots))
            undo.callback(files[-1].close)
        if directory:
            files.append(_in_own_place(Path(directory), slot_bytes, disk_slots))
            undo.callback(files[-1].close)
        if not files:
            reason = f"leaves no tier, with less than a block here and no {DIRECTORY}"
            raise UsageError(HOST_MIB, os.environ.get(HOST_MIB, ""), reason)
        store = BlockStore(*files)
        undo.pop_all()
    return store


def _in_own_place(directory: Path, slot_bytes: int, num_slots: int) -> SlotFile:
    """In the first of the directory's numbered places that no living process has: who is started
    again finds blocks of a process that ended. Keys say what is in them, so whose they were is of
    no account."""
    for number in range(MAX_PLACES):
        place = directory / str(number)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(DIRECTORY, str(directory), error.strerror or str(error)) from error
        found = SlotFile.in_directory_if_free(
            place, slot_bytes, num_slots, os.environ.get(WHOSE, "")
        )
        if found is not None:
            return found
    raise UsageError(DIRECTORY, str(directory), f"{MAX_PLACES} processes have their tiers there")


def _number(variable: str, default: int, least: int, most: int) -> int:
    given = os.environ.get(variable, "")
    if not given:
        return default
    if not given.isdecimal() or not least <= int(given) <= most:
        raise UsageError(variable, given, f"must be a whole number from {least} to {most}")
    return int(given)
