"""`kvxfer launch`: its commands. Each imports what it runs when it runs."""

from __future__ import annotations

import sys

import cyclopts

from kvxfer.command import Settings, parse
from kvxfer.config import WorkerOptions
from kvxfer.serve.options import RayOptions
from kvxfer.serve.scale import ScaleOptions

launch = cyclopts.App(
    name="launch", help="Start workers on many hosts, and serve in front of them."
)


@launch.command
def ray(*, options: RayOptions = RayOptions(), worker: WorkerOptions) -> int:  # noqa: B008
    """Place prefill and decode workers on a Ray cluster, and serve OpenAI's API in front of them.

    The cluster is that of RAY_ADDRESS, or the one that runs on this host, or a new one here. Who
    dies is started again, on another node if need be; `kvxfer launch scale` has more or fewer of
    them. Several hosts need --key-file and --peer-keys, and the model, the keys and kvxfer[ray] at
    the same place on each. Ctrl-C ends all at once, SIGTERM once the requests under way have ended.
    Example: kvxfer launch ray --model DIR --prefill 2 --decode 2
    """
    from kvxfer.serve.launch_ray import run_launch_ray

    by_role = {
        role: parse(ray, sys.argv[3:], Settings("ray", role))["worker"]
        for role in ("prefill", "decode")
    }
    return run_launch_ray(options, worker, by_role)


@launch.command
def scale(options: ScaleOptions = ScaleOptions()) -> int:  # noqa: B008
    """Have more workers, or fewer, of a running `kvxfer launch ray --enable-admin`.

    Who is to leave finishes what it has: no request is lost. Returns at once; `kvxfer status` shows
    who is there. Example: kvxfer launch scale --prefill 3 --decode 1
    """
    from kvxfer.serve.scale import run_scale

    return run_scale(options)
