"""What decode keeps of the KV that it had, so that only the missing blocks of a prompt travel.

A block goes into the cache when its KV is proved: of the prompt once all of it is here and its
digest, where one is asked for, is prefill's; of the output when the request has ended well. Before
that no other request can come to it, and after that nobody writes to it: decode appends behind the
prompt's whole blocks, and a hand-over begins behind what was found. A block that was in quarantine
is never kept.

What decode computed token by token has other last bits than if prefill had computed it in chunks,
as everything that is computed in batches of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode.schedule import DecodeRequest
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.prefixes import make_prefix_cache, prefix_status


class Prefixes:
    """Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        self._pools = parts.engine.pools
        self._cache = make_prefix_cache(parts)
        self._block_size = parts.engine.specs[0].block_size

    def allocate(
        self, request: DecodeRequest, needed: Sequence[int], kept: Sequence[int]
    ) -> list[int]:
        """Give `request` so many blocks of each group, first those of its longest cached beginning:
        at least one token is left to hand over, and `kept` blocks of each group stay free. Returns
        how many free ones of each group that wants, where they are not there and nothing was
        given, else nothing."""
        num_prompt = request.num_prompt_tokens
        request.hashes = request.hashes or self._cache.hashes(request.tokens)
        prefix = self._cache.lookup(request.hashes, num_prompt)
        cost = self._cache.cost(needed, prefix)
        wanted = [n + more for n, more in zip(cost, kept, strict=True)]
        if not self._pools.can_allocate(wanted):
            return wanted
        request.blocks = self._cache.allocate(needed, prefix)
        request.num_cached = request.tokens_read = len(prefix[0]) * self._block_size
        self._cache.count(num_prompt, request.num_cached)
        return []

    def keep_prompt(self, request: DecodeRequest) -> None:
        """The KV of the whole prompt was proved to be here."""
        tokens = range(request.num_cached, request.num_prompt_tokens)
        self._cache.insert(request.hashes, request.blocks, tokens)

    def keep_output(self, request: DecodeRequest) -> None:
        """`request`, which was decoding, has ended well and still holds its blocks: of its newest
        token there is no KV."""
        tokens = [*request.generate.tokens, *request.output[:-1]]
        hashes = self._cache.hashes(tokens, request.hashes)
        computed = range(request.num_prompt_tokens, len(tokens))
        self._cache.insert(hashes, request.blocks, computed)

    def counts(self) -> tuple[int, int]:
        """Tokens that were looked up, and that were found."""
        return self._cache.query_tokens, self._cache.hit_tokens

    def status(self) -> dict[str, int]:
        return prefix_status(self._cache)
