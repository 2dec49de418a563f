"""The digest of a prompt's KV at both ends of a hand-over, where one is asked for.

Of what is handed over, and not of what decode had before: prefill may have computed that again,
in chunks that round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import KvxferError
from kvxfer.transfer.checksum import DigestPolicy, combined, should_check
from kvxfer.transfer.checksum_shard import KVShard
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.checksums import checksum_of

Blocks = Sequence[Sequence[int]]


class Integrity:
    """Control thread only; digests are computed in the model thread, between its steps."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._specs = parts.engine.specs
        self._policy = DigestPolicy(parts.options.kv_digest)
        self._shards = [
            KVShard(views, spec.num_kv_heads, group=group)
            for group, (views, spec) in enumerate(
                zip(parts.engine.cache.views, self._specs, strict=True)
            )
        ]

    def wants(self, request_id: str) -> bool:
        return should_check(self._policy, request_id)

    def compute(
        self,
        blocks: Blocks,
        tokens: range,
        theirs: Sequence[KVCacheSpec],
        done: Callable[[int], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Of what travels to or from a cache of `theirs`: `blocks` are those of the entries that a
        hand-over of `tokens`, all up to the prompt's end, brings, group by group. They stay as they
        are until it is `done`."""
        self._parts.model.submit(partial(self._digest, blocks, tokens, theirs), done, failed)

    def _digest(self, blocks: Blocks, tokens: range, theirs: Sequence[KVCacheSpec]) -> int:
        group = self._parts.engine.group
        if group is not None:
            called = [list(ids) for ids in blocks], tokens.stop, list(theirs), tokens.start
            return combined(group.call("kv_checksum", *called))
        counts = [True] * len(self._specs)
        named = blocks, tokens.stop, theirs, counts, tokens.start
        return checksum_of(self._shards, self._specs, *named)
