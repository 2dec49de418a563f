"""Which prompts, and which grants, a prefill worker takes."""

from __future__ import annotations

import math

from kvxfer.cache.prefix_cache import why_not_cached
from kvxfer.control.messages import PrefillRequest
from kvxfer.control.session import Peer
from kvxfer.errors import UsageError
from kvxfer.model.sampling import SampleSpec
from kvxfer.transfer.sides import why_not_blocks
from kvxfer.worker.engine import Engine


def why_not(request: PrefillRequest, peer: Peer, engine: Engine) -> str:
    """Why a prompt of `peer` can never be served by this worker, in one line, or ''."""
    num_tokens, grant, sampling = len(request.tokens), request.grant, request.sampling
    if num_tokens < 1 or engine.why_too_long(num_tokens, 0):
        return f"prompt of {num_tokens} tokens: this worker takes 1 to {engine.max_model_len}"
    if not 0 <= min(request.tokens) <= max(request.tokens) < engine.info.vocab_size:
        return f"prompt: a token is not in the vocabulary of {engine.info.vocab_size}"
    if wrong := why_not_granted(peer, grant.blocks, grant.num_cached_tokens, num_tokens):
        return wrong
    if not 0 < grant.timeout_s < math.inf:
        return f"grant has a timeout of {grant.timeout_s} s"
    try:
        SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
    except UsageError as error:
        return str(error)
    return ""


def why_not_granted(
    peer: Peer, blocks: list[list[int]] | None, num_cached: int, num_tokens: int
) -> str:
    """Why `peer` cannot mean these blocks of its cache, for a prompt of whose `num_tokens` it has
    the first `num_cached`, or ''. Without blocks none are said to be there."""
    assert peer.facts is not None
    geometry = peer.facts.geometry
    wrong = why_not_cached(geometry.specs, num_cached, num_tokens)
    if blocks is not None:
        wrong = wrong or why_not_blocks(geometry, blocks, num_tokens, num_cached)
    elif num_cached:
        wrong = f"num_cached_tokens: {num_cached}, and no blocks"
    return f"grant: {wrong}" if wrong else ""
