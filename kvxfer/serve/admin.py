"""What is served for whoever runs the service, besides the API for clients.

| request                   | answer                                                              |
| ---                       | ---                                                                 |
| GET /status               | 200 and an `Overview`                                               |
| GET /workers              | 200 and its workers                                                 |
| POST /workers             | {"address": A, "role": "prefill" or "decode"}: 202, it is greeted   |
| POST /workers/{id}/drain  | 202; it takes nothing new, and leaves once it has finished          |
| POST /scale               | {"prefill": N, "decode": M}, or one of them: 202 and how many there |
|                           | are to be; where workers are placed by us (`kvxfer launch`)         |

All want the API key, if there is one. The POSTs are there only where they were enabled: who may
send them may have the router dial any address that it may dial. Errors have OpenAI's form.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvxfer.errors import UsageError
from kvxfer.serve.overview import Overview
from kvxfer.serve.router import Router

MOST_BODY_BYTES = 64 << 10
REASON = "an administrator asked for it"

Answer = Callable[[Request], Awaitable[Response]]
Scale = Callable[[Mapping[str, int]], Mapping[str, int]]
"""How many workers there shall be, by role; returns how many of each there are to be. Raises
UsageError, and changes nothing then."""


class NewWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str
    """As it is dialled: with keys ADDRESS#NAME."""
    role: Literal["prefill", "decode"]


class NewNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    prefill: int | None = None
    decode: int | None = None

    def asked(self) -> dict[str, int]:
        found = {"prefill": self.prefill, "decode": self.decode}
        return {role: count for role, count in found.items() if count is not None}


def admin_routes(
    router: Router,
    describe: Callable[[], Overview],
    *,
    api_keys: Sequence[str] = (),
    may_change: bool = False,
    scale: Scale | None = None,
) -> list[Route]:
    """Called in the router's own thread, as all of the application is."""

    async def status(request: Request) -> Response:
        return _json(200, describe())

    async def workers(request: Request) -> Response:
        return _json(200, {"workers": describe().workers})

    async def add(request: Request) -> Response:
        try:
            new = msgspec.json.decode(await _body(request), type=NewWorker)
        except msgspec.MsgspecError as error:
            return _error(400, f"the body is no worker: {error}")
        try:
            router.add(new.address, new.role)
        except UsageError as error:
            return _error(400, str(error), error.field)
        return _json(202, {"address": new.address, "role": new.role})

    async def drain(request: Request) -> Response:
        worker_id = request.path_params["worker_id"]
        try:
            router.drain(worker_id, REASON)
        except UsageError as error:
            return _error(404, str(error), "worker_id")
        return _json(202, {"id": worker_id})

    def guarded(answer: Answer) -> Answer:
        async def check(request: Request) -> Response:
            return await answer(request) if _is_allowed(request, api_keys) else _unauthorized()

        return check

    found = [Route("/status", guarded(status)), Route("/workers", guarded(workers))]
    if may_change:
        found += [
            Route("/workers", guarded(add), methods=["POST"]),
            Route("/workers/{worker_id:path}/drain", guarded(drain), methods=["POST"]),
        ]
    if may_change and scale is not None:
        found.append(Route("/scale", guarded(_scaling(scale)), methods=["POST"]))
    return found


def _scaling(scale: Scale) -> Answer:
    async def answer(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await _body(request), type=NewNumbers).asked()
        except msgspec.MsgspecError as error:
            return _error(400, f"the body is no numbers of workers: {error}")
        try:
            return _json(202, scale(asked))
        except UsageError as error:
            return _error(400, str(error), error.field)

    return answer


async def _body(request: Request) -> bytes:
    """At most MOST_BODY_BYTES of it: what is cut is no JSON any more."""
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > MOST_BODY_BYTES:
            break
    return found[:MOST_BODY_BYTES]


def _is_allowed(request: Request, api_keys: Sequence[str]) -> bool:
    kind, _, told = request.headers.get("authorization", "").partition(" ")
    matches = [hmac.compare_digest(told.strip().encode(), key.encode()) for key in api_keys]
    return not api_keys or (kind.lower() == "bearer" and any(matches))


def _json(code: int, content: Any) -> Response:
    return Response(msgspec.json.encode(content), code, media_type="application/json")


def _unauthorized() -> Response:
    return _error(401, "this needs an API key: Authorization: Bearer KEY", None, "invalid_api_key")


def _error(code: int, text: str, parameter: str | None = None, word: str | None = None) -> Response:
    kind = "authentication_error" if code == 401 else "invalid_request_error"
    told = {"message": text, "type": kind, "param": parameter, "code": word}
    return _json(code, {"error": told})
