"""Which prompts a decode worker takes, and which prefill worker gets each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode.schedule import DecodeRequest
from kvxfer.control.messages import Generate
from kvxfer.control.session import Peer
from kvxfer.errors import UsageError
from kvxfer.model.sampling import SampleSpec
from kvxfer.worker.engine import Engine


def why_not(generate: Generate, engine: Engine) -> str:
    """Why a prompt can never be served by this worker, in one line, or ''."""
    if not generate.tokens or generate.max_new_tokens < 1:
        return "prompt and max_new_tokens: at least one token each"
    if too_long := engine.why_too_long(len(generate.tokens), generate.max_new_tokens):
        return too_long
    if not 0 <= min(generate.tokens) <= max(generate.tokens) < engine.info.vocab_size:
        return f"prompt: a token is not in the vocabulary of {engine.info.vocab_size}"
    sampling = generate.sampling
    try:
        SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
    except UsageError as error:
        return str(error)
    return ""


def choose_prefill(
    request: DecodeRequest, ready: Sequence[Peer], requests: Iterable[DecodeRequest]
) -> Peer | None:
    """The ready prefill worker that `request` names, or else the one with the fewest of
    `requests`; None when it is not there."""
    wanted = request.generate.prefill
    load = [id(other.prefill) for other in requests]
    fitting = [peer for peer in ready if wanted in ("", peer.name)]
    return min(fitting, key=lambda peer: load.count(id(peer)), default=None)
