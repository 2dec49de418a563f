"""`kvxfer status`: what a router, or `kvxfer serve`, says of itself, for a person or a machine."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import msgspec
from cyclopts import Parameter

from kvxfer.errors import KvxferError, UsageError
from kvxfer.serve.asking import check_url, send
from kvxfer.serve.overview import Overview
from kvxfer.serve.status_screen import StatusScreen


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """What `kvxfer status` may be told."""

    url: str = "http://127.0.0.1:8000"
    """Where the router serves HTTP."""
    api_key: str = ""
    """If it wants one (default: KVXFER_API_KEY)."""
    json: bool = False
    """Print what it says as JSON."""
    watch: bool = False
    """Show it again and again, until Ctrl-C."""
    interval_s: float = 1.0
    """Between two looks."""
    timeout_s: float = 5.0
    """For an answer."""


def run_status(options: StatusOptions) -> int:
    """Raises KvxferError where nobody answers, or what answers is no router."""
    check_url(options.url)
    for name in ("interval_s", "timeout_s"):
        if not 0 < getattr(options, name) < 3600:
            raise UsageError(name, getattr(options, name), "must be more than 0 and below 3600")
    screen = StatusScreen(options.url)
    while True:
        raw = ask(options)
        found = read(options.url, raw)
        if options.json:
            sys.stdout.write(msgspec.json.format(raw, indent=1).decode() + "\n")
            sys.stdout.flush()
        else:
            screen.show(found, again=options.watch)
        if not options.watch:
            return 0
        time.sleep(options.interval_s)


def ask(options: StatusOptions) -> bytes:
    """The body of GET /status. Raises KvxferError, in one line."""
    return send(options.url, "/status", api_key=options.api_key, timeout_s=options.timeout_s)


def read(url: str, raw: bytes) -> Overview:
    """Raises KvxferError for bytes that are no overview."""
    try:
        return msgspec.json.decode(raw, type=Overview)
    except msgspec.MsgspecError as error:
        raise KvxferError(f"{url}: what answers is no router of kvxfer: {error}") from None
