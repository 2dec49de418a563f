"""Which devices a transfer bench moves KV between, and which connectors there are."""

from __future__ import annotations

from kvxfer.errors import UsageError
from kvxfer.transfer.connector import load_connector

HOST = ("cpu", "cpu")


def resolve_devices(names: str) -> tuple[str, str]:
    """The source's and the target's: of 'auto' two GPUs, else one twice, else the host. Raises
    UsageError for what is not there, or a GPU with the host."""
    from kvxfer.worker.device import resolve_device

    if names == "auto":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return ("cuda:0", "cuda:1" if count > 1 else "cuda:0") if count else HOST
    parts = names.split(",")
    if len(parts) != 2 or "auto" in parts:
        raise UsageError("devices", names, "must be two devices, such as cuda:0,cuda:1, or auto")
    source, target = (resolve_device(part) for part in parts)
    if (source == "cpu") != (target == "cpu"):
        raise UsageError("devices", names, "both must be GPUs, or both the host")
    return source, target


def why_no_connector(name: str) -> str:
    """Why `name` cannot be measured, or ''."""
    try:
        load_connector(name)
    except UsageError as error:
        return str(error)
    return ""
