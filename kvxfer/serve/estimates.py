"""What a router knows of its workers' load, put together for the choice of a pair.

`kvxfer.serve.pairing` says where each number comes from. A Status is up to half a second old: what
this router gave to a worker, or heard of it, since then it counts by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvxfer.cache.footprint import blocks_needed
from kvxfer.cache.prefix_cache import block_hashes
from kvxfer.control.facts import WorkerFacts
from kvxfer.serve.backend import Backend
from kvxfer.serve.completion import Completion
from kvxfer.serve.pairing import DecodeSide, PrefillSide, choose_one, choose_pair
from kvxfer.serve.prefix_index import PrefixIndex

FIRST_PREFILL_TOKENS_PER_S = 10_000.0
FIRST_DECODE_TOKENS_PER_S = 1_000.0
FIRST_LANE_GBPS = 1.0
"""Where no worker has measured any yet: some order of magnitude, the same for all."""
MAX_HASHED_TOKENS = 16_384
"""Of a prompt: hashing costs about a microsecond for each block."""

Values = Mapping[str, int | float | str]


def number(values: Values, name: str) -> float:
    """A worker's word: 0 where it is none, or no number that makes sense."""
    found = values.get(name, 0)
    return float(found) if isinstance(found, int | float) and 0 < found < 1e18 else 0.0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Of one that is to be placed."""

    tokens: Sequence[int]
    max_new_tokens: int
    cached: Mapping[str, int]
    """Tokens of its beginning that a worker has, by its incarnation."""


class Estimates:
    """One thread. `completions` are the router's: all that have not ended."""

    def __init__(self, completions: Mapping[str, Completion]) -> None:
        self._completions = completions
        self._index = PrefixIndex()
        self._chance = random.Random()

    def told(self, backend: Backend, values: Values) -> None:
        """Its Status came, which it may have said before it was free of what has ended by now."""
        backend.status, backend.status_s = values, time.monotonic()
        backend.has_cached |= number(values, "prefix_cache_blocks") > 0
        if backend.role == "prefill":
            waits = self._waiting_at(backend)
            ours = sum(len(one.tokens) for one in waits)
            all_of_it = number(values, "prefill_tokens_queued")
        else:
            ours, all_of_it = len(self._decoding_at(backend)), number(values, "requests")
        backend.num_of_others = max(0, int(all_of_it) - backend.num_ours)
        backend.num_ours = ours

    def place(
        self, completion: Completion, prefills: Sequence[Backend], decodes: Sequence[Backend]
    ) -> Backend:
        """Choose from `decodes`, of which there are some, and `prefills`; the decode worker, and
        what the completion then says of its pair."""
        generate = completion.generate
        hashes = self._hashes(generate.tokens, [*prefills, *decodes])
        cached = self._cached(hashes)
        prompt = _Prompt(generate.tokens, generate.max_new_tokens, cached)
        pace = _typical(decodes, "decode_tokens_per_s", FIRST_DECODE_TOKENS_PER_S)
        takers = [self._decode_side(one, prompt, pace) for one in decodes]
        completion.prefill, completion.num_uncached = None, 0
        if prefills:
            pace = _typical(prefills, "prefill_tokens_per_s", FIRST_PREFILL_TOKENS_PER_S)
            sides = [self._prefill_side(one, prompt, pace) for one in prefills]
            rate = lambda p, d: _bytes_per_s(prefills[p], decodes[d])  # noqa: E731
            at, to = choose_pair(sides, takers, rate, self._chance)
            completion.prefill = prefills[at]
            completion.num_uncached = sides[at].tokens_uncached
            prefills[at].num_ours += len(generate.tokens)  # it sees what is cached when it begins
            self._note(hashes, prefills[at])
        else:
            to = choose_one([side.seconds for side in takers], self._chance)
        self._note(hashes, decodes[to])
        decodes[to].num_ours += 1
        completion.backend, completion.placed_s = decodes[to], time.monotonic()
        named = completion.prefill.name if completion.prefill is not None else ""
        completion.generate = msgspec.structs.replace(generate, prefill=named)
        return decodes[to]

    # --- what they have -----------------------------------------------------------------------

    def _hashes(self, tokens: Sequence[int], backends: Sequence[Backend]) -> dict[int, list[bytes]]:
        """By block size."""
        sizes = {_block_size(one) for one in backends}
        return {size: block_hashes(tokens[:MAX_HASHED_TOKENS], size) for size in sizes}

    def _cached(self, hashes: Mapping[int, Sequence[bytes]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for size, keys in hashes.items():
            found |= {name: count * size for name, count in self._index.lookup(keys).items()}
        return found

    def _note(self, hashes: Mapping[int, Sequence[bytes]], backend: Backend) -> None:
        assert backend.facts is not None
        self._index.insert(hashes[_block_size(backend)], backend.facts.incarnation)

    # --- what they are doing ------------------------------------------------------------------

    def _waiting_at(self, prefill: Backend) -> list[Completion]:
        """Of ours, to be computed there: their first token has not come."""
        all_of_them = self._completions.values()
        waits = (one for one in all_of_them if one.prefill is prefill and not one.output)
        return [one for one in waits if not one.is_waiting]

    def _decoding_at(self, decode: Backend) -> list[Completion]:
        all_of_them = self._completions.values()
        return [one for one in all_of_them if one.backend is decode and not one.is_waiting]

    def _prefill_side(self, backend: Backend, prompt: _Prompt, pace: float) -> PrefillSide:
        """`pace`: tokens a second, of one that has measured none."""
        assert backend.facts is not None
        num_tokens = len(prompt.tokens)
        needed = sum(blocks_needed(backend.facts.geometry.specs, num_tokens, 0, num_tokens))
        waits = self._waiting_at(backend)
        since = (one for one in waits if one.placed_s > backend.status_s)
        held = sum(_blocks(backend, len(one.tokens)) for one in since)
        return PrefillSide(
            tokens_queued=backend.num_of_others + sum(one.num_uncached for one in waits),
            tokens_uncached=max(1, num_tokens - _cached_tokens(backend, prompt)),
            tokens_per_s=number(backend.status, "prefill_tokens_per_s") or pace,
            lacks_blocks=needed > _blocks_left(backend) - held,
        )

    def _decode_side(self, backend: Backend, prompt: _Prompt, pace: float) -> DecodeSide:
        assert backend.facts is not None
        num_tokens, specs = len(prompt.tokens), backend.facts.geometry.specs
        num_missing = max(0, num_tokens - _cached_tokens(backend, prompt))
        needed = sum(blocks_needed(specs, num_tokens, prompt.max_new_tokens, 1))
        there = self._decoding_at(backend)
        since = (one for one in there if one.placed_s > backend.status_s)
        lengths = (len(one.tokens) + one.generate.max_new_tokens for one in since)
        held = sum(_blocks(backend, length) for length in lengths)
        return DecodeSide(
            queue_wait_s=number(backend.status, "queue_wait_s"),
            num_requests=backend.num_of_others + len(there),
            max_new_tokens=prompt.max_new_tokens,
            tokens_per_s=number(backend.status, "decode_tokens_per_s") or pace,
            num_bytes=num_missing * _token_bytes(backend.facts),
            lacks_blocks=needed > _blocks_left(backend) - held,
        )


def _typical(backends: Sequence[Backend], name: str, otherwise: float) -> float:
    """The mean of those that have measured it: a worker that is new counts as one of them."""
    told = [value for one in backends if (value := number(one.status, name))]
    return sum(told) / len(told) if told else otherwise


def _block_size(backend: Backend) -> int:
    assert backend.facts is not None
    return backend.facts.geometry.specs[0].block_size


def _cached_tokens(backend: Backend, prompt: _Prompt) -> int:
    """As far as is known; 0 where nothing ever was."""
    assert backend.facts is not None
    return prompt.cached.get(backend.facts.incarnation, 0) if backend.has_cached else 0


def _blocks(backend: Backend, num_tokens: int) -> int:
    assert backend.facts is not None
    return sum(spec.num_blocks(num_tokens) for spec in backend.facts.geometry.specs)


def _blocks_left(backend: Backend) -> float:
    """Free, cached (which are given up when wanted) or not committed yet; of one that has not told,
    any number."""
    values = backend.status
    if not values:
        return float("inf")
    committed, total = number(values, "committed_bytes"), number(values, "blocks_total")
    growable = number(values, "budget_bytes") - committed
    grown = growable * total / committed if committed and growable > 0 else 0.0
    return number(values, "blocks_free") + number(values, "prefix_cache_blocks") + grown


def _token_bytes(facts: WorkerFacts) -> int:
    """KV of one token, in all groups and ranks."""
    each = sum(spec.block_bytes // spec.block_size for spec in facts.geometry.specs)
    return each * facts.tensor_parallel_size


def _bytes_per_s(prefill: Backend, decode: Backend) -> float:
    """Of their lane; 0 where decode does not know this prefill worker."""
    if not decode.status:
        return FIRST_LANE_GBPS * 1e9
    if f"lane {prefill.name}" not in decode.status:
        return 0.0
    return (number(decode.status, f"lane_gbps {prefill.name}") or FIRST_LANE_GBPS) * 1e9
