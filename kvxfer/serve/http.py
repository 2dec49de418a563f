"""The OpenAI-compatible application.

| path                 | what                                                      |
| ---                  | ---                                                       |
| /v1/completions      | see `endpoint`                                            |
| /v1/chat/completions | likewise, of messages                                     |
| /v1/models           | the one model that is served                              |
| /health              | 200 when a probe went through a pair of workers just now  |
| /ready               | 200 when there are a prefill and a decode worker          |

Everything under /v1 asks for an API key if there is one.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvxfer.serve.admission import Admission
from kvxfer.serve.front import Front
from kvxfer.serve.health import Probe
from kvxfer.serve.openai.endpoint import GenerationEndpoint
from kvxfer.serve.openai.errors import ApiError, json_response
from kvxfer.serve.openai.types import ChatRequest, CompletionRequest
from kvxfer.serve.served import Limits, ServedModel

ROLES = ("prefill", "decode")


def make_app(
    front: Front,
    served: ServedModel,
    limits: Limits | None = None,
    *,
    api_keys: Sequence[str] = (),
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """`routes` are served as well, without an API key. The application takes `front` into its loop
    as it starts and out of it as it ends; the router stays its owner's."""
    limits = limits or Limits()
    executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
    common = (front, served, limits, Admission(limits.max_concurrent_requests), executor)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        front.start()
        try:
            yield
        finally:
            front.close()
            executor.shutdown(cancel_futures=True)

    own = [
        Route("/v1/completions", GenerationEndpoint(CompletionRequest, *common), methods=["POST"]),
        Route("/v1/chat/completions", GenerationEndpoint(ChatRequest, *common), methods=["POST"]),
        *_about(front, served, limits),
    ]
    return Starlette(
        routes=[*own, *routes],
        middleware=[Middleware(_ApiKeys, api_keys)] if api_keys else [],
        exception_handlers={ApiError: _on_error, HTTPException: _on_error, Exception: _on_error},
        lifespan=lifespan,
    )


def _about(front: Front, served: ServedModel, limits: Limits) -> list[Route]:
    """What tells of the service."""
    probe = Probe(front, served, limits)
    card = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "kvxfer",
        "max_model_len": served.max_model_len,
    }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise ApiError(404, "there is no such model", param="model", code="model_not_found")
        return json_response(card)

    async def health(request: Request) -> Response:
        is_well, told = await probe.outcome()
        return json_response(told, 200 if is_well else 503)

    async def ready(request: Request) -> Response:
        counts = {role: len(front.ready(role)) for role in ROLES}
        missing = [role for role, count in counts.items() if count == 0]
        if missing or not front.can_serve or not front.router.is_ready:
            missing = missing or ["a decode worker that has met a prefill worker"]
            return json_response({"status": "not ready", "missing": missing, **counts}, 503)
        return json_response({"status": "ready", **counts})

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ready", ready),
    ]


async def _on_error(request: Request, error: Exception) -> Response:
    """In OpenAI's form, whatever it was."""
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, where, headers=error.headers)
    if not isinstance(error, ApiError):  # a bug of ours: Starlette raises it again, to be logged
        error = ApiError(500, "internal error")
    return error.response()


class _ApiKeys:
    """Lets nobody under /v1 without one of the keys."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._allows(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            problem = "no valid API key in the Authorization header (Bearer KEY)"
            refused = ApiError(401, problem, code="invalid_api_key", headers=headers)
            await refused.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, in time that tells nothing of how much of one was right.
        return sum(hmac.compare_digest(token.strip(), key) for key in self._keys) > 0
