"""`kvxfer complete`: sends prompts to workers started by hand, and streams the answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvxfer.control.auth import Keys
from kvxfer.control.channel import check_dial
from kvxfer.control.router_messages import Sampling
from kvxfer.errors import KvxferError, UsageError
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.completion import Backend
from kvxfer.serve.router import Router
from kvxfer.serve.text import TextStream


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteOptions:
    """What `kvxfer complete` may be told."""

    model: Path
    """The directory that the workers run; its tokenizer is read here."""
    decode: Annotated[tuple[str, ...], Parameter(negative=())]
    """Address of a decode worker, with keys ADDRESS#NAME of its key; may be given several times. A
    prompt whose worker is lost before a token of it came goes to another."""
    key_file: Path | None = None
    """Secret key of this command, NAME.key of `kvxfer keygen`."""
    peer_keys: Path | None = None
    """Directory with the NAME.pub of the workers."""
    prompt: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A prompt; may be given several times (default: one a line from standard input)."""
    max_new_tokens: int = 48
    """Tokens generated for each prompt."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    seed: int = 0
    """The noise of a token is a function of the seed and its position alone."""
    connect_timeout_s: float = 30.0
    """For the decode worker to answer."""
    timeout_s: float = 120.0
    """For one answer."""


def run_complete(options: CompleteOptions) -> int:
    """Send each prompt, print its answer as it comes. Raises KvxferError."""
    _check(options)
    keys = Keys.load(options.key_file, options.peer_keys)
    for address in options.decode:
        check_dial("decode", address, keys)
    info = inspect_model(options.model)
    tokenizer = Tokenizer.load(options.model)
    router = Router(survives_loss=True, request_timeout_s=options.timeout_s, keys=keys)
    try:
        backends = router.connect(options.decode, options.connect_timeout_s)
        for one in backends:
            if one.facts is not None and one.facts.model != info.fingerprint:
                reason = "the decode worker runs another model"
                raise UsageError("model", str(options.model), reason)
        backend = backends[0]
        for text in _prompts(options.prompt):
            _answer(options, info, tokenizer, router, backend, text)
    finally:
        router.close()
    return 0


def _check(options: CompleteOptions) -> None:
    if options.max_new_tokens < 1:
        raise UsageError("max_new_tokens", options.max_new_tokens, "must be at least 1")
    if not options.temperature >= 0:
        raise UsageError("temperature", options.temperature, "must be 0 or more")
    if not 0 < options.top_p <= 1:
        raise UsageError("top_p", options.top_p, "must be more than 0 and at most 1")


def _prompts(given: Sequence[str]) -> Iterable[str]:
    return given or (line.rstrip("\n") for line in sys.stdin if line.strip())


def _answer(
    options: CompleteOptions,
    info: ModelInfo,
    tokenizer: Tokenizer,
    router: Router,
    backend: Backend,
    text: str,
) -> None:
    completion = router.submit(
        backend,
        tokenizer.encode(text),
        options.max_new_tokens,
        sampling=Sampling(options.temperature, options.top_p, options.seed),
        stop_token_ids=info.eos_token_ids,
    )
    stream = TextStream(text, completion, tokenizer)
    while completion.finished is None:
        router.poll(0.02)
        print(stream.new_text(), end="", flush=True)
    print(stream.new_text())
    if completion.finished.error:
        raise KvxferError(completion.finished.error)
