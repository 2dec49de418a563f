"""What `kvxfer router`, `serve` and `launch` may be told. vLLM's names where they mean the same,
and Ray's for what Ray does."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvxfer.control.auth import Keys
from kvxfer.control.channel import check_dial
from kvxfer.errors import UsageError
from kvxfer.telemetry.logs import LogFormat
from kvxfer.telemetry.spans import check_endpoint

MOST_WORKERS = 64
"""That `kvxfer serve` starts of each kind; far more is a slip of the finger."""

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Ray's, of a placement group."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The HTTP side, of both commands."""

    host: str = "127.0.0.1"
    """Address to serve HTTP on. Others than this host can reach any but a loopback one: give
    api_key then, and TLS in front."""
    port: int = 8000
    """Port to serve HTTP on; 0 takes a free one."""
    api_key: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Clients must send one of these as 'Authorization: Bearer KEY'; may be given several times.
    Other users of this host see flags: KVXFER_API_KEY, or the file, keep it to yourself."""
    served_model_name: str = ""
    """The model's name in the API (default: what --model says)."""
    chat_template: Path | None = None
    """A Jinja file, instead of the tokenizer's own chat template."""
    max_concurrent_requests: int = 1024
    """Most completions under way; beyond it clients are answered 429, with Retry-After."""
    shutdown_timeout_s: float = 30.0
    """After SIGTERM: for requests under way to end. After Ctrl-C nothing is waited for."""
    enable_admin: bool = False
    """Serve POST /workers and POST /workers/ID/drain: who may call the API may then make the router
    dial any address that it may dial."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(HttpOptions):
    """What `kvxfer router` may be told."""

    model: Path
    """The directory that the workers run; the router reads its tokenizer and chat template."""
    prefill: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)]
    """Address of each prefill worker, with keys ADDRESS#NAME; it may start later."""
    decode: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)]
    """Address of each decode worker, with keys ADDRESS#NAME; it may start later."""
    config: Path | None = None
    """TOML file with options under their names, for all commands or in a table [router]. Flags
    rank above KVXFER_* variables, these above the file."""
    key_file: Path | None = None
    """Secret key of this router, NAME.key of `kvxfer keygen`."""
    peer_keys: Path | None = None
    """Directory with the NAME.pub of the workers; read again when one comes or goes."""
    max_model_len: int = 0
    """Longest prompt plus output in tokens (default: the model's). The workers' decides; a smaller
    one here refuses earlier."""
    otlp_traces_endpoint: str = ""
    """URL that OpenTelemetry traces of requests are sent to (OTLP over HTTP), as in
    http://127.0.0.1:4318/v1/traces. Needs kvxfer[otel]; workers have to be told it, too."""
    log_format: LogFormat = "text"
    """text, or json: an object a line."""
    request_timeout_s: float = 120.0
    """For one answer."""
    peer_timeout_s: float = 5.0
    """Silence after which a worker counts as lost."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(HttpOptions):
    """What `kvxfer serve` may be told besides what its workers may."""

    prefill: int = 1
    """Prefill workers to start."""
    decode: int = 1
    """Decode workers to start."""
    start_timeout_s: float = 600.0
    """For all workers to be ready."""
    log_dir: Path | None = None
    """Write the workers' logs to NAME.log in this directory (default: a temporary one, which is
    deleted at the end)."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions(ServeOptions):
    """What `kvxfer launch ray` may be told besides what its workers may."""

    address: str = ""
    """Of the cluster, as for ray.init (default: RAY_ADDRESS, then a cluster that runs on this host,
    then a new one here, which ends with this command)."""
    num_cpus: float = 1.0
    """CPUs that Ray reserves for each worker."""
    num_gpus: float | None = None
    """GPUs that Ray reserves for each worker; a part of one shares it (default: one for each rank
    where the cluster has GPUs and --device does not say cpu, else none)."""
    placement_group_strategy: Strategy = "PACK"
    """PACK: on few nodes; SPREAD: on many; STRICT_PACK: on one; STRICT_SPREAD: each on its own.
    Of the workers that are started together."""
    placement_timeout_s: float = 120.0
    """For the cluster to have room for all of them."""


def check_http(options: HttpOptions) -> None:
    """Refuse what can be refused without starting anything. Raises UsageError."""
    if not 0 <= options.port <= 65535:
        raise UsageError("port", options.port, "must be between 0 and 65535")
    if options.max_concurrent_requests < 1:
        value = options.max_concurrent_requests
        raise UsageError("max_concurrent_requests", value, "must be at least 1")
    check_seconds("shutdown_timeout_s", options.shutdown_timeout_s, least=0.0)
    for key in options.api_key:
        if not key.isascii() or not key.isprintable() or " " in key or not key:
            raise UsageError("api_key", "***", "must be printable ASCII without spaces")


def check_seconds(name: str, value: float, least: float = 0.001) -> None:
    if not least <= value < math.inf:
        raise UsageError(name, value, f"must be at least {least:g} and finite")


def check_router(options: RouterOptions) -> Keys | None:
    """The same for `kvxfer router`, whose keys it returns."""
    check_http(options)
    check_endpoint(options.otlp_traces_endpoint)
    check_seconds("request_timeout_s", options.request_timeout_s)
    check_seconds("peer_timeout_s", options.peer_timeout_s)
    if options.max_model_len < 0:
        raise UsageError("max_model_len", options.max_model_len, "must be at least 0")
    keys = Keys.load(options.key_file, options.peer_keys)
    for role, addresses in (("prefill", options.prefill), ("decode", options.decode)):
        for address in addresses:
            check_dial(role, address, keys)
    every = (*options.prefill, *options.decode)
    for address in every:
        if every.count(address) > 1:
            raise UsageError("decode", address, "is given twice")
    return keys


def check_serve(options: ServeOptions) -> None:
    """The same for `kvxfer serve`."""
    check_http(options)
    check_seconds("start_timeout_s", options.start_timeout_s)
    for role in ("prefill", "decode"):
        if not 1 <= getattr(options, role) <= MOST_WORKERS:
            reason = f"must be between 1 and {MOST_WORKERS}"
            raise UsageError(role, getattr(options, role), reason)


def is_open_to_others(options: HttpOptions) -> bool:
    """Whether other hosts may reach the API, and need no key for it."""
    if options.api_key or options.host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        return True
