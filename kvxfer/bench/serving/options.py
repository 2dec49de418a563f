"""What `kvxfer bench serving` may be told: vLLM's names and defaults where they mean the same.

Annotations are objects here, not text: the command line evaluates them.
"""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from kvxfer.errors import UsageError

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Of a request, in ms: see `kvxfer.bench.serving.metrics`."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Those that a request has one of."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEEDS_OWN = ("compare_single", "verify", "worker_args")
"""What goes with a service that the bench starts itself."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """The load, where it goes, and what is told of it."""

    base_url: str = ""
    """An OpenAI-compatible service that runs already, as in http://127.0.0.1:8000."""
    model: str = ""
    """With --base-url the model's name in the API (default: the first that it lists), else the
    directory of a model: `kvxfer serve` is started with it."""
    api_key: str = ""
    """For --base-url (default: OPENAI_API_KEY); shown nowhere."""
    endpoint: str = COMPLETIONS
    """/v1/completions, whose prompts are sent as tokens, or /v1/chat/completions, as text."""
    prefill: int = 1
    """Prefill workers of a service that is started."""
    decode: int = 1
    """Decode workers of it."""
    threads: int = 1
    """CPU threads of each of its workers."""
    worker_args: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    """More flags of `kvxfer serve` for its workers, in one string, as in "--block-size 32"."""
    compare_single: bool = False
    """Give the same load to a single process too, which prefills and decodes by itself, with the
    threads of all workers together: round by round, each service alone on the machine."""
    verify: bool = False
    """After the rounds ask a single process for the first round's prompts, and compare the tokens
    and the digests of the prompts' KV."""
    num_prompts: int = 1000
    """Requests of a round; of a trace at most so many."""
    random_input_len: int = 1024
    """Tokens of a prompt, without the prefix."""
    random_output_len: int = 128
    """Tokens of an answer."""
    random_range_ratio: float = 0.0
    """Both lengths are uniform in [length * (1 - ratio), length * (1 + ratio)]; in [0, 1)."""
    random_prefix_len: int = 0
    """Tokens in front that all prompts of a round share."""
    random_vocab_size: int = 0
    """Prompts are tokens below this (default: the model's, or 256 where it is not known)."""
    trace: Path | None = None
    """JSON lines with timestamp (ms), input_length, output_length and, if they are known, hash_ids
    of 512 tokens each, as Mooncake's traces have them; instead of the random lengths."""
    trace_speed: float = 1.0
    """The trace's clock: 2 sends it in half its time."""
    trace_scale: float = 1.0
    """The trace's lengths times this, for models that take no such prompts."""
    request_rate: float = math.inf
    """Open loop: requests a second. inf sends all at once, or as --max-concurrency lets them."""
    burstiness: float = 1.0
    """Of the pauses between requests, which are gamma distributed: 1 is a Poisson process, less is
    burstier, more is steadier."""
    max_concurrency: int = 0
    """Closed loop: most requests under way (0: any number)."""
    seed: int = 0
    """Of lengths, prompts and pauses; each round has its own, both services of it the same."""
    num_warmups: int = 4
    """Requests before each round that are not counted."""
    runs: int = 3
    """Rounds."""
    ignore_eos: bool | None = None
    """Ask for answers of the full length (default: where kvxfer or vLLM answers)."""
    honor_retry_after: bool = False
    """Send what was answered 429 again when Retry-After says so: times count from the first time.
    Else it has failed."""
    request_timeout_s: float = 600.0
    """For an answer."""
    start_timeout_s: float = 600.0
    """For a service that is started to be ready."""
    percentile_metrics: str = "ttft,tpot,itl"
    """Whose percentiles are told, separated by commas: of ttft, tpot, itl, e2el."""
    metric_percentiles: str = "99"
    """Which percentiles, separated by commas."""
    goodput: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ()
    """Limits in ms, as in ttft:200 tpot:50 e2el:5000: goodput is how many requests a second keep
    them all."""
    log_dir: Path | None = None
    """Keep the logs of services that are started here (default: they are deleted)."""
    json: Path | None = None
    """Keep the figures in this file."""

    def check(self) -> None:
        """Refuse what can be refused before anything is started. Raises UsageError."""
        self._check_place()
        self._check_numbers()
        self._check_load()
        self.percentiles()
        self.measured()
        self.limits_ms()

    def _check_place(self) -> None:
        if not self.base_url and not self.model:
            raise UsageError("base_url", "", "give it, or --model DIR to start a service")
        if self.endpoint not in (COMPLETIONS, CHAT):
            raise UsageError("endpoint", self.endpoint, f"must be {COMPLETIONS} or {CHAT}")
        if not self.base_url:
            if not (Path(self.model) / "config.json").is_file():
                reason = "is no directory of a model; the name of one goes with --base-url"
                raise UsageError("model", self.model, reason)
            self.worker_words()
            return
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError("base_url", self.base_url, "must begin with http:// or https://")
        if not self.api_key.isascii() or not (self.api_key or "x").isprintable():
            raise UsageError("api_key", "***", "must be printable ASCII")
        for name in NEEDS_OWN:
            if getattr(self, name):
                reason = "goes with a service that is started: --model DIR without --base-url"
                raise UsageError(name, getattr(self, name), reason)

    def _check_numbers(self) -> None:
        lengths = ("random_input_len", "random_output_len")
        positive = ("prefill", "decode", "threads", "num_prompts", "runs", *lengths)
        natural = ("random_prefix_len", "random_vocab_size", "max_concurrency", "num_warmups")
        for name, least in [*((n, 1) for n in positive), *((n, 0) for n in (*natural, "seed"))]:
            if getattr(self, name) < least:
                raise UsageError(name, getattr(self, name), f"must be at least {least}")
        if self.random_vocab_size == 1:
            raise UsageError("random_vocab_size", 1, "must be at least 2")
        for name in ("request_timeout_s", "start_timeout_s", "burstiness"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(name, getattr(self, name), "must be more than 0 and finite")
        for name in ("trace_speed", "trace_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(name, getattr(self, name), "must be more than 0 and finite")
        if not self.request_rate > 0:
            raise UsageError("request_rate", self.request_rate, "must be more than 0, or inf")
        if not 0 <= self.random_range_ratio < 1:
            raise UsageError("random_range_ratio", self.random_range_ratio, "must be in [0, 1)")

    def _check_load(self) -> None:
        if self.trace is not None and self.request_rate != math.inf:
            reason = "a trace says itself when requests come: --trace-speed changes it"
            raise UsageError("request_rate", self.request_rate, reason)
        if self.trace is None and (self.trace_speed, self.trace_scale) != (1.0, 1.0):
            raise UsageError("trace_speed, trace_scale", "given", "go with --trace")
        if self.burstiness != 1.0 and self.request_rate == math.inf:
            raise UsageError("burstiness", self.burstiness, "goes with --request-rate")
        if self.verify and self.endpoint == CHAT:
            raise UsageError("verify", True, f"goes with {COMPLETIONS}")

    def worker_words(self) -> list[str]:
        """The flags in `worker_args`."""
        try:
            return shlex.split(self.worker_args)
        except ValueError as error:
            raise UsageError("worker_args", self.worker_args, str(error)) from None

    def percentiles(self) -> list[float]:
        found = []
        for text in self.metric_percentiles.split(","):
            try:
                found.append(float(text))
            except ValueError:
                raise UsageError("metric_percentiles", text, "is no number") from None
            if not 0 < found[-1] < 100:
                raise UsageError("metric_percentiles", text, "must be between 0 and 100")
        return found

    def measured(self) -> list[str]:
        """Metrics whose percentiles are told."""
        found = [text.strip() for text in self.percentile_metrics.split(",")]
        for name in found:
            if name not in METRICS:
                raise UsageError("percentile_metrics", name, f"must be of {', '.join(METRICS)}")
        return found

    def limits_ms(self) -> dict[str, float]:
        """By metric, of those that goodput asks for."""
        found: dict[str, float] = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            if name not in GOODPUT_METRICS or name in found:
                reason = f"must be METRIC:MS with each of {', '.join(GOODPUT_METRICS)} once at most"
                raise UsageError("goodput", text, reason)
            try:
                found[name] = float(value)
            except ValueError:
                raise UsageError("goodput", text, "has no number of ms") from None
            if not 0 < found[name] < math.inf:
                raise UsageError("goodput", text, "must be more than 0 ms and finite")
        return found
