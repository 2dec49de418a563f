"""The scheduler's half: names requests and blocks; moves nothing.

`Request` and `KVCacheBlocks` are vLLM's; of them only what is read here is relied on.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from connectors.vllm.handover import Claim, Load, Offer, RankAddress, Source, Step, num_tokens_of
from kvxfer.errors import UsageError

logger = logging.getLogger(__name__)

_COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Names of vLLM's RequestStatus for requests whose prompt was computed to its end."""


class Scheduler:
    """One thread: vLLM's scheduler's."""

    def __init__(
        self,
        engine_id: str,
        groups: Sequence[int],
        windows: Sequence[tuple[int, int]] = (),
        *,
        is_producer: bool,
        is_consumer: bool,
    ) -> None:
        """`groups`: which of vLLM's groups are handed over. `windows`: of those with one, its
        tokens and those of a block."""
        self._engine_id = engine_id
        self._groups = tuple(groups)
        self._windows = tuple(windows)
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._ranks: tuple[RankAddress, ...] = ()
        self._step = Step()
        self._claimed: dict[str, int] = {}
        """Requests whose KV waits elsewhere, not to be loaded yet: tokens that may be."""
        self._loading: set[str] = set()

    def set_ranks(self, ranks: Mapping[int, RankAddress]) -> None:
        """Where this engine's workers are dialled, by rank."""
        self._ranks = tuple(ranks[rank] for rank in sorted(ranks))

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and self._is_producer:
            self._shorten(request)
        if params.get("do_remote_prefill"):
            self._claim(request, params)

    # ---- consumer

    def _claim(self, request: Any, params: Mapping[str, Any]) -> None:
        request_id = request.request_id
        if not self._is_consumer:
            logger.warning("request %s: do_remote_prefill, and this is no consumer", request_id)
            return
        try:
            source = Source.parse(params)
            count = num_tokens_of(params)
        except UsageError as error:
            logger.warning("request %s is prefilled here: %s", request_id, error)
            return
        self._claimed[request_id] = min(request.num_prompt_tokens, count)
        self._step.claims.append(Claim(request_id, source))

    def num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond those computed, and whether that is asynchronous."""
        count = self._claimed.get(request.request_id, 0) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Of a claimed request, the first time: load, or let go what it has already."""
        end = self._claimed.pop(request.request_id, None)
        if end is None:
            return
        if num_external_tokens <= 0:
            self._step.drops.append(request.request_id)
            return
        ids = tuple(
            [0 if block.is_null else block.block_id for block in blocks.blocks[group]]
            for group in self._groups
        )
        self._loading.add(request.request_id)
        self._step.loads.append(Load(request.request_id, end - num_external_tokens, end, ids))

    def loads_ended(self, request_ids: set[str]) -> None:
        self._loading -= request_ids

    # ---- producer

    def _shorten(self, request: Any) -> None:
        """Leave a prompt's last token to the consumer where vLLM would else, at the request's end,
        free a block that this token sees the last of: after n tokens it keeps what the next one
        sees, positions n + 1 - window and up, and the consumer computes the one before that."""
        num_tokens = request.num_prompt_tokens
        is_cut = any(
            num_tokens > window and (num_tokens + 1 - window) % size == 0
            for window, size in self._windows
        )
        if not is_cut or num_tokens < 2 or request.prompt_token_ids is None:
            return
        del request.prompt_token_ids[-1:]
        del request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1

    def request_finished(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are to stay, and what the answer says of them."""
        request_id = request.request_id
        if self._claimed.pop(request_id, None) is not None or request_id in self._loading:
            self._step.drops.append(request_id)
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        if not self._is_producer:
            logger.warning("request %s: do_remote_decode, and this is no producer", request_id)
            return False, None
        blocks = tuple(list(block_ids[group]) for group in self._groups)
        if request.status.name not in _COMPLETE or not any(map(any, blocks)):
            return False, None
        source = Source(self._engine_id, request_id, secrets.token_hex(16), self._ranks)
        num_tokens = request.num_computed_tokens
        self._step.offers.append(Offer(request_id, source.lease_id, num_tokens, blocks))
        return True, source.params(num_tokens)

    # ---- every step

    def take_step(self) -> Step:
        step, self._step = self._step, Step()
        return step
