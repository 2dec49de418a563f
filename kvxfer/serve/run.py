"""`kvxfer router` and `kvxfer serve`: from options to an exit code, with nothing left behind."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from kvxfer.config import LAYOUT_VARIABLE, WorkerOptions
from kvxfer.config_file import RAY_KEYS, ROUTER_KEYS, WORKER_KEYS
from kvxfer.control.auth import Keys
from kvxfer.control.channel import check_dial
from kvxfer.errors import UsageError
from kvxfer.launch.local import LocalLauncher
from kvxfer.launch.supervisor import Supervisor
from kvxfer.memory.limits import HostMemory
from kvxfer.serve.options import (
    HttpOptions,
    RouterOptions,
    ServeOptions,
    check_router,
    check_serve,
)
from kvxfer.serve.plan import Machine, ServePlan, count_gpus, plan_serve
from kvxfer.serve.progress import StartScreen
from kvxfer.serve.router import Router
from kvxfer.serve.served import ServedModel
from kvxfer.serve.service import Service
from kvxfer.serve.uvicorn_server import bind
from kvxfer.telemetry.logs import LogFormat, set_up_logging
from kvxfer.telemetry.spans import open_spans

OUR_VARIABLES = frozenset(
    f"KVXFER_{name.upper()}" for name in {*WORKER_KEYS, *ROUTER_KEYS, *RAY_KEYS, "config"}
) - {LAYOUT_VARIABLE}
"""Of the environment: said to a command that starts workers, not to these."""


def run_router(options: RouterOptions) -> int:
    """Serve HTTP in front of workers that others started. Raises KvxferError."""
    start_log("router", options.log_format)
    keys = check_router(options)
    served = load_served(options, options.model, options.max_model_len)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(options.host, options.port))
        router = Router(
            options.peer_timeout_s,
            survives_loss=True,
            request_timeout_s=options.request_timeout_s,
            keys=keys,
        )
        stack.callback(router.close)
        for role, addresses in (("prefill", options.prefill), ("decode", options.decode)):
            for address in addresses:
                router.add(address, role)
        spans = open_spans(options.otlp_traces_endpoint, "router", "router")
        stack.callback(spans.close)
        Service(options, served, router, listener, spans=spans).run()
    return 0


def run_serve(
    options: ServeOptions, worker: WorkerOptions, by_role: Mapping[str, WorkerOptions]
) -> int:
    """Start workers on this host, and serve HTTP in front of them. `worker` is what all are told,
    `by_role` what those of a role are. Raises KvxferError."""
    start_log("serve", worker.log_format)
    check_serve(options)
    keys = Keys.load(worker.key_file, worker.peer_keys)
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-serve-")))
        counts = {"prefill": options.prefill, "decode": options.decode}
        machine = Machine(count_gpus(), HostMemory().measure().free_bytes)
        plan = plan_serve(counts, by_role, machine, run_dir)
        _check_keys(plan, by_role, keys)
        served = load_served(options, worker.model, worker.max_model_len)
        listener = stack.enter_context(bind(options.host, options.port))
        screen = StartScreen([one.name for one in plan.workers])
        launcher = stack.enter_context(LocalLauncher(log_dir(options, run_dir), screen.step))
        router = Router(
            worker.peer_timeout_s,
            survives_loss=True,
            request_timeout_s=worker.request_timeout_s,
            keys=keys,
        )
        stack.callback(router.close)
        spans = open_spans(worker.otlp_traces_endpoint, "router", "serve")
        stack.callback(spans.close)
        stack.enter_context(screen)
        supervisor = _start_workers(plan, launcher, router, screen)

        def announce(line: str) -> None:
            screen.close()
            print(line, flush=True)

        Service(
            options, served, router, listener, spans=spans, supervisor=supervisor,
            start_timeout_s=options.start_timeout_s, announce=announce, on_end=launcher.terminate,
        ).run()  # fmt: skip
    return 0


def _check_keys(plan: ServePlan, by_role: Mapping[str, WorkerOptions], keys: Keys | None) -> None:
    """Refuse, before anything starts, keys with which the router would reach no worker."""
    for role, given in by_role.items():
        if given.key_file is not None and keys is None:
            reason = f"is the {role} workers' alone, and the router needs a key, too"
            raise UsageError("key_file", str(given.key_file), reason)
    for one in plan.workers:
        check_dial(one.module, one.address, keys)


def _start_workers(
    plan: ServePlan, launcher: LocalLauncher, router: Router, screen: StartScreen
) -> Supervisor:
    for note in plan.notes:
        screen.say(note)
    supervisor = Supervisor(launcher, worker_environment(os.environ))
    supervisor.start(plan.workers)
    for role in ("prefill", "decode"):
        for address in plan.addresses(role):
            router.add(address, role)
    return supervisor


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what is told to `serve`: its workers get all they need as flags, and no API key."""
    return {name: value for name, value in environment.items() if name not in OUR_VARIABLES}


def log_dir(options: ServeOptions, run_dir: Path) -> Path:
    """Where workers' logs go; made if need be. Raises UsageError."""
    if options.log_dir is None:
        return run_dir
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("log_dir", str(options.log_dir), error.strerror or str(error)) from None
    return options.log_dir


def load_served(options: HttpOptions, model: Path, max_model_len: int) -> ServedModel:
    return ServedModel.load(
        model,
        name=options.served_model_name,
        max_model_len=max_model_len or None,
        chat_template=options.chat_template,
    )


def start_log(name: str, log_format: LogFormat) -> None:
    set_up_logging(name, name, log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
