"""A client of one vLLM engine: completions, metrics, and what its KV blocks hold."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.telemetry.reading import totals

MODEL_NAME = "bench"
"""What every engine calls its model."""
TIMEOUT_S = 120.0
LOOK_TIMEOUT_S = 10.0
"""For an answer about the engine."""
MOST_DETAIL = 300
"""Characters that are kept of what an engine said."""


class EngineError(KvxferError):
    """An engine refused, failed, or is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To one completion, which was asked for at 0 s."""

    tokens: tuple[int, ...]
    first_token_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Of the engine `name`, on this host. Every call has a connection of its own and a deadline,
    and raises EngineError."""

    name: str
    port: int

    def prefill(
        self, prompt: Sequence[int], request_id: str, timeout_s: float = TIMEOUT_S
    ) -> tuple[dict[str, Any], float]:
        """The first of the two steps: what the consumer is to be told, and the seconds it took."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        began_s = time.monotonic()
        body = _completion(prompt, 1, params)
        with self._asked("POST", "/v1/completions", body, request_id, timeout_s) as response:
            told = json.loads(response.read()).get("kv_transfer_params")
        if not isinstance(told, dict):
            raise EngineError(f"{self.name}: its answer has no kv_transfer_params")
        return told, time.monotonic() - began_s

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Greedy, as many tokens as asked for. With what `prefill` returned: the second step."""
        body = _completion(prompt, max_tokens, kv_transfer_params) | {"stream": True}
        tokens: list[int] = []
        began_s, first_s = time.monotonic(), 0.0
        with self._asked("POST", "/v1/completions", body, request_id, timeout_s) as response:
            for event in _events(response):
                if "error" in event:
                    raise EngineError(f"{self.name}: {str(event['error'])[:MOST_DETAIL]}")
                for choice in event.get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                if tokens and not first_s:
                    first_s = time.monotonic() - began_s
        return Answer(tuple(tokens), first_s, time.monotonic() - began_s)

    @contextmanager
    def abandon(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any],
        request_id: str,
    ) -> Iterator[None]:
        """A request whose client goes away, with the context's end, before it was answered."""
        body = _completion(prompt, max_tokens, kv_transfer_params)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), _headers(request_id))
            yield

    def is_healthy(self, timeout_s: float = 2.0) -> bool:
        try:
            with self._asked("GET", "/health", timeout_s=timeout_s):
                return True
        except EngineError:
            return False

    def version(self) -> str:
        """Of vLLM."""
        with self._asked("GET", "/version", timeout_s=LOOK_TIMEOUT_S) as response:
            return str(json.loads(response.read())["version"])

    def metrics(self) -> dict[str, float]:
        """Totals over labels, by name."""
        with self._asked("GET", "/metrics", timeout_s=LOOK_TIMEOUT_S) as response:
            return totals(response.read().decode())

    def block_digests(self) -> set[str]:
        """Of all blocks of its cache that hold anything (`kvxfer.bench.vllm.digests`)."""
        body = {"method": "kv_block_digests"}
        with self._asked("POST", "/collective_rpc", body) as response:
            (digests,) = json.loads(response.read())["results"]
        return set(digests) - {""}

    def reset_prefix_cache(self) -> None:
        """From here on it knows no prompt."""
        with self._asked("POST", "/reset_prefix_cache", {}, timeout_s=LOOK_TIMEOUT_S):
            return

    @contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            with closing(connection):
                text = None if body is None else json.dumps(body)
                connection.request(method, path, text, _headers(request_id))
                response = connection.getresponse()
                if response.status != 200:
                    detail = response.read().decode(errors="replace")[:MOST_DETAIL]
                    raise EngineError(f"{self.name}: {path}: {response.status}: {detail}")
                yield response
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(f"{self.name}: {path}: {reason}") from error


def _headers(request_id: str) -> dict[str, str]:
    """Both steps of a request have one id, as with vLLM's own proxies."""
    headers = {"Content-Type": "application/json"}
    return headers | {"X-Request-Id": request_id} if request_id else headers


def _completion(
    prompt: Sequence[int], max_tokens: int, kv_transfer_params: Mapping[str, Any] | None
) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body if kv_transfer_params is None else body | {"kv_transfer_params": kv_transfer_params}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events. Raises ValueError for one that breaks off before its end
    mark: http.client takes that for its end."""
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:"):
            yield json.loads(data)
    raise ValueError("the answer broke off")
