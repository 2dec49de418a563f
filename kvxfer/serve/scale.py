"""`kvxfer launch scale`: other numbers of workers for a launcher that runs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from cyclopts import Parameter

from kvxfer.errors import KvxferError, UsageError
from kvxfer.serve.asking import check_url, send


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What `kvxfer launch scale` may be told."""

    prefill: int | None = None
    """Prefill workers that there shall be (default: as many as there are)."""
    decode: int | None = None
    """Decode workers that there shall be (default: as many as there are)."""
    url: str = "http://127.0.0.1:8000"
    """Where the launcher serves HTTP."""
    api_key: str = ""
    """If it wants one (default: KVXFER_API_KEY)."""
    timeout_s: float = 5.0
    """For an answer."""


def run_scale(options: ScaleOptions) -> int:
    """Raises KvxferError where nobody answers, or what answers does not do it."""
    check_url(options.url)
    asked = {"prefill": options.prefill, "decode": options.decode}
    wanted = {role: count for role, count in asked.items() if count is not None}
    if not wanted:
        raise UsageError("prefill", None, "give --prefill, --decode or both")
    raw = send(
        options.url, "/scale", api_key=options.api_key, timeout_s=options.timeout_s,
        body=msgspec.json.encode(wanted),
    )  # fmt: skip
    try:
        told = msgspec.json.decode(raw, type=dict[str, int])
    except msgspec.MsgspecError as error:
        raise KvxferError(f"{options.url}: what answers is no kvxfer launch: {error}") from None
    print("there are to be " + " and ".join(f"{told[role]} {role}" for role in sorted(told)[::-1]))
    return 0
