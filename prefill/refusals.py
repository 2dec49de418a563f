"""Which requests a prefill worker can never serve."""

from __future__ import annotations

import math

from kvxfer.control.messages import PrefillRequest
from kvxfer.control.session import Peer
from kvxfer.errors import UsageError
from kvxfer.model.sampling import SampleSpec
from kvxfer.transfer.sides import why_not_blocks
from kvxfer.worker.engine import Engine


def why_not(request: PrefillRequest, peer: Peer, engine: Engine) -> str:
    """Why a request of `peer` cannot be served, in one line, or ''."""
    num_tokens = len(request.tokens)
    assert peer.facts is not None
    if num_tokens < 1 or engine.why_too_long(num_tokens, 0):
        return f"prompt of {num_tokens} tokens: this worker takes 1 to {engine.max_model_len}"
    if not 0 <= min(request.tokens) <= max(request.tokens) < engine.info.vocab_size:
        return f"prompt: a token is not in the vocabulary of {engine.info.vocab_size}"
    wrong = why_not_blocks(peer.facts.geometry, request.grant.blocks, num_tokens)
    if wrong:
        return f"grant: {wrong}"
    if not 0 < request.grant.timeout_s < math.inf:
        return f"grant has a timeout of {request.grant.timeout_s} s"
    sampling = request.sampling
    try:
        SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
    except UsageError as error:
        return str(error)
    return ""
