"""The OpenAI-compatible application.

| path                 | what                                                          |
| ---                  | ---                                                           |
| /v1/completions      | see `generation`                                              |
| /v1/chat/completions | likewise, of messages                                         |
| /v1/models           | the one model that is served                                  |
| /health              | 200 when a probe went through a pair of workers just now      |
| /ready               | 200 when there are a prefill and a decode worker              |

Everything under /v1 asks for an API key if there is one.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvxfer.serve.front import Front
from kvxfer.serve.openai_errors import ApiError, json_response, on_api_error
from kvxfer.serve.served import Limits, ServedModel


def make_app(
    front: Front,
    served: ServedModel,
    limits: Limits | None = None,
    *,
    api_keys: Sequence[str] = (),
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """`routes` are served as well, without an API key. The application starts `front` in its loop
    and closes it when it ends; the router stays its owner's."""
    raise NotImplementedError
