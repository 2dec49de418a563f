"""The `kvxfer` command."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import cyclopts
from cyclopts import Parameter

from kvxfer.bench.commands import bench
from kvxfer.command import Settings, parse, run_app
from kvxfer.config import WorkerOptions
from kvxfer.demo.plan import DemoOptions
from kvxfer.serve.commands import launch
from kvxfer.serve.complete import CompleteOptions
from kvxfer.serve.options import RouterOptions, ServeOptions
from kvxfer.serve.status import StatusOptions

app = cyclopts.App(
    name="kvxfer",
    help="Disaggregated prefill/decode KV transfer on KV caches that grow.",
    config=[Settings()],
    result_action="return_value",
)
app.command(bench)
app.command(launch)


@app.command
def demo(options: DemoOptions = DemoOptions()) -> int:  # noqa: B008  frozen, so it may be shared
    """Prefill prompts in one process, decode them in another, and prove that nothing changed.

    Starts a prefill worker, a decode worker and a router, hands the KV of each prompt over with
    NIXL, makes decode's cache grow while another request's KV is on its way, and compares KV and
    tokens with the same model run in a single process. Exit code 1 if anything differs.
    """
    from kvxfer.demo.run import run_demo

    return run_demo(options)


@app.command
def serve(*, options: ServeOptions = ServeOptions(), worker: WorkerOptions) -> int:  # noqa: B008
    """Start prefill and decode workers on this host, and serve OpenAI's API in front of them.

    GPUs are given to the workers in turn, memory is divided among them, and who dies is started
    again. Ctrl-C ends all at once, SIGTERM once the requests under way have ended.
    Example: kvxfer serve --model DIR --prefill 2 --decode 2
    """
    from kvxfer.serve.run import run_serve

    by_role = {
        role: parse(serve, sys.argv[2:], Settings("serve", role))["worker"]
        for role in ("prefill", "decode")
    }
    return run_serve(options, worker, by_role)


@app.command
def prefill(options: WorkerOptions) -> int:
    """Run a prefill worker: computes prompts and hands their KV to decode workers.

    It binds --listen, prints where, and serves until Ctrl-C.
    Example: kvxfer prefill --model DIR --listen tcp://127.0.0.1:5601
    """
    return _become("prefill")


@app.command
def decode(
    options: WorkerOptions,
    *,
    prefill: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> int:
    """Run a decode worker: takes prompts from routers, their KV from prefill workers.

    Example: kvxfer decode --model DIR --listen tcp://127.0.0.1:5602
    --prefill tcp://127.0.0.1:5601

    Parameters
    ----------
    prefill
        Address of each prefill worker; it may start later. A router that knows prefill workers
        tells which there are: from then on its word counts.
    """
    return _become("decode")


def _become(module: str) -> NoReturn:
    """Go on as `python -m module` with the same arguments, which were found good: the core imports
    no worker."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *sys.argv[2:]])


@app.command
def router(options: RouterOptions) -> int:
    """Serve OpenAI's API in front of workers that were started by others.

    Example: kvxfer router --model DIR --prefill tcp://127.0.0.1:5601
    --decode tcp://127.0.0.1:5602
    """
    from kvxfer.serve.run import run_router

    return run_router(options)


@app.command
def status(options: StatusOptions = StatusOptions()) -> int:  # noqa: B008
    """What a router says of itself: its workers, their caches, queues and lanes.

    Example: kvxfer status --url http://127.0.0.1:8000 --watch
    """
    from kvxfer.serve.status import run_status

    return run_status(options)


@app.command
def complete(options: CompleteOptions) -> int:
    """Send prompts to workers without HTTP, and stream the answers.

    Example: kvxfer complete --model DIR --decode tcp://127.0.0.1:5602 --prompt "To be"
    """
    from kvxfer.serve.complete import run_complete

    return run_complete(options)


@app.command
def doctor(*, json: bool = False) -> int:
    """What this machine can do, what is set or will be, and what to do where something is amiss.

    Exit code 1 if a check fails. Nothing that it starts stays behind.

    Parameters
    ----------
    json
        Print the findings as JSON.
    """
    from kvxfer.doctor.run import run_doctor

    return run_doctor(json)


@app.command
def keygen(directory: Path, name: str) -> int:
    """Make a pair of keys for one worker or router: DIRECTORY/NAME.key, its secret, and NAME.pub.

    NAME.key stays with the process that it is for (--key-file). NAME.pub goes into the directory
    (--peer-keys) of each that may talk to it. Both have mode 0600; a file that is there is never
    written over. Example: kvxfer keygen keys decode-0

    Parameters
    ----------
    directory
        Made with mode 0700 where there is none.
    name
        Others dial ADDRESS#NAME.
    """
    from kvxfer.control.auth import make_key_pair

    for path in make_key_pair(directory, name):
        print(path)
    return 0


def main() -> None:
    """Entry point: 0 ok, 1 failure, 2 usage, 130 after Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both unwind: nothing stays behind
    try:
        sys.exit(run_app(app, sys.argv[1:]))
    except BrokenPipeError:  # who read our output has gone; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("kvxfer: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
