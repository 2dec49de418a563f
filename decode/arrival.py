"""Between the proof that a prompt's KV is here and its first decode step: digests, and only then
the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from decode.prefixes import Prefixes
from decode.schedule import DecodeRequest
from kvxfer.transfer.digest import prompt_digests
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.integrity import Integrity


class Arrival:
    """Control thread only. Each request that is checked is joined or failed, once."""

    def __init__(
        self,
        parts: WorkerParts,
        join: Callable[[DecodeRequest], None],
        fail: Callable[[DecodeRequest, str], None],
        prefixes: Prefixes,
    ) -> None:
        self._parts = parts
        self._prefixes = prefixes
        self._integrity = Integrity(parts)
        self._join = join
        self._fail = fail

    def wants_digest(self, request_id: str) -> bool:
        return self._integrity.wants(request_id)

    def check(self, request: DecodeRequest, digest: int | None) -> None:
        """All of it is here; where a digest was asked for, it has to be that of what is here."""
        if not request.wants_digest:
            self._filled(request)
            return

        def compare(found: int) -> None:
            if found == digest:
                self._filled(request)
            else:
                self._fail(request, f"digest: KV of {found:#x} arrived, prefill had {digest}")

        assert request.prefill is not None and request.prefill.facts is not None
        theirs = request.prefill.facts.geometry.specs
        self._integrity.compute(
            request.handed_blocks,
            range(request.num_cached, request.num_prompt_tokens),
            theirs,
            compare,
            lambda error: self._fail(request, str(error)),
        )

    def _filled(self, request: DecodeRequest) -> None:
        """Only now do the blocks count as filled: digests first, before decode writes to them."""
        self._prefixes.keep_prompt(request)
        if not request.generate.verify or self._parts.engine.size > 1:
            self._join(request)
            return
        cache = self._parts.engine.cache
        self._parts.model.submit(
            partial(prompt_digests, cache, request.tables, request.num_prompt_tokens),
            partial(self._digested, request),
            lambda error: self._fail(request, str(error)),
        )

    def _digested(self, request: DecodeRequest, digests: list[str]) -> None:
        request.kv_digests = digests
        self._join(request)
