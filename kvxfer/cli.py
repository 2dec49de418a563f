"""The `kvxfer` command."""

from __future__ import annotations

import os
import signal
import sys

import cyclopts

from kvxfer.bench.growth import GrowthOptions
from kvxfer.command import run_app
from kvxfer.demo.plan import DemoOptions
from kvxfer.serve.prompts import RouterOptions

app = cyclopts.App(
    name="kvxfer",
    help="Disaggregated prefill/decode KV transfer on KV caches that grow.",
    result_action="return_value",
)


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
def router(options: RouterOptions) -> int:
    """Send prompts to workers that were started by hand, and stream the answers.

    Example: kvxfer router --model DIR --decode tcp://127.0.0.1:5602 --prompt "To be"
    """
    from kvxfer.serve.prompts import run_router

    return run_router(options)


bench = cyclopts.App(name="bench", help="Measure, with verified data.")
app.command(bench)


@bench.command
def growth(options: GrowthOptions = GrowthOptions()) -> int:  # noqa: B008
    """How long until memory that a cache was just extended by is of use to a peer.

    Example, on a GPU: kvxfer bench growth --gib 64 --json growth.json
    """
    from kvxfer.bench.growth import run_growth

    return run_growth(options)


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
