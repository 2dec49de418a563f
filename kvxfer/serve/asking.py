"""Asking a router over HTTP, for commands that show or change something."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request

from kvxfer.errors import KvxferError, UsageError

MOST_BYTES = 16 << 20


def check_url(url: str) -> None:
    """Raises UsageError."""
    if not url.startswith(("http://", "https://")):
        raise UsageError("url", url, "must begin with http:// or https://")


def send(
    url: str, path: str, *, api_key: str, timeout_s: float, body: bytes | None = None
) -> bytes:
    """The body of the answer; POST where there is a `body` of JSON. Raises KvxferError, in one
    line."""
    key = api_key or os.environ.get("KVXFER_API_KEY", "").replace(",", " ").partition(" ")[0]
    request = urllib.request.Request(url.rstrip("/") + path, body)
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise KvxferError(f"{url}: answered {error.code} {_why(error)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        text = f"{url}: nobody answers: {getattr(reason, 'strerror', None) or reason}"
        raise KvxferError(text) from None


def _why(error: urllib.error.HTTPError) -> str:
    """The reason, and what else it says if it is a router's refusal."""
    if error.code == 401:
        return f"{error.reason}: give --api-key"
    try:
        message = json.loads(error.read(MOST_BYTES))["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return str(error.reason)
    return f"{error.reason}: {' '.join(str(message).split())}"
