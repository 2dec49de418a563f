"""What a request comes to in each group of a cache. Pure; both ends of a hand-over compute it.

In a model with an encoder (one of its groups is CROSS) the prompt is the encoder's: its KV fills
the CROSS groups, and the decoder's own groups begin with one token, the decoder's start.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.spec import GroupKind, KVCacheSpec

Specs = Sequence[KVCacheSpec]


def has_encoder(specs: Specs) -> bool:
    return GroupKind.CROSS in [spec.kind for spec in specs]


def decoder_start(specs: Specs, num_prompt: int) -> int:
    """Position at which the first generated token stands in the decoder."""
    return 1 if has_encoder(specs) else num_prompt


def prompt_chunks(specs: Specs, num_prompt: int, chunk_tokens: int) -> list[range]:
    """The prompt in the stretches that are computed at once: an encoder sees all of it."""
    size = num_prompt if has_encoder(specs) else chunk_tokens
    starts = range(0, num_prompt, max(1, size))
    return [range(start, min(start + size, num_prompt)) for start in starts]


def kv_tokens(specs: Specs, num_prompt: int, num_new: int) -> list[int]:
    """Tokens of KV, group by group, of a prompt and `num_new` more."""
    grown = decoder_start(specs, num_prompt) + num_new
    return [num_prompt if spec.kind is GroupKind.CROSS else grown for spec in specs]


def blocks_needed(specs: Specs, num_prompt: int, num_new: int, step_tokens: int) -> list[int]:
    """Blocks to hold, group by group, from the first token to the last, if at most `step_tokens`
    are computed at once."""
    tokens = kv_tokens(specs, num_prompt, num_new)
    return [spec.blocks_held(n, step_tokens) for spec, n in zip(specs, tokens, strict=True)]


def prompt_entries(specs: Specs, num_prompt: int, num_cached: int = 0) -> list[range]:
    """The entries, group by group, that a hand-over of the prompt's KV has to bring, where its
    first `num_cached` tokens are there already."""
    tokens = kv_tokens(specs, num_prompt, 0)
    found = [spec.kept(n) for spec, n in zip(specs, tokens, strict=True)]
    if not num_cached:
        return found
    firsts = [num_cached // spec.block_size for spec in specs]
    return [
        range(max(one.start, first), one.stop) for one, first in zip(found, firsts, strict=True)
    ]


def travelling(
    specs: Specs, num_prompt: int, computed: range, theirs: Specs | None = None
) -> list[range]:
    """The tokens of KV, group by group, that travel once the prompt's tokens `computed` are: of
    each chunk what is kept; the decoder's start with the last chunk.

    `theirs` are the other end's specs. Windows keep whole blocks, so where block sizes differ, the
    end with the larger blocks keeps some tokens more in front: what travels is what both keep,
    from the later of the two starts. No later token sees those in front of it.
    """
    firsts = _first_kept(specs, num_prompt)
    if theirs is not None:
        firsts = list(map(max, firsts, _first_kept(theirs, num_prompt)))
    found = []
    for spec, first in zip(specs, firsts, strict=True):
        if has_encoder(specs) and spec.kind is not GroupKind.CROSS:
            found.append(range(int(computed.stop == num_prompt and bool(computed))))
        else:
            start = max(computed.start, first)
            found.append(range(start, max(start, computed.stop)))
    return found


def _first_kept(specs: Specs, num_prompt: int) -> list[int]:
    """The first token, group by group, of the entries that are kept."""
    if not any(spec.window for spec in specs):
        return [0] * len(specs)
    entries = prompt_entries(specs, num_prompt)
    return [kept.start * spec.block_size for spec, kept in zip(specs, entries, strict=True)]
