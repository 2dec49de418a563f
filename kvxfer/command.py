"""Run a typed function as a command: flags from its types, usage errors in one line, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import cyclopts

from kvxfer.errors import KvxferError


def run_command(command: Callable[..., int], name: str) -> NoReturn:
    """A program of one command; its exit code is what `command` returns."""
    app = cyclopts.App(name=name, version_flags=[], result_action="return_value")
    app.default(command)
    sys.exit(run_app(app, sys.argv[1:]))


def run_app(app: cyclopts.App, arguments: Sequence[str]) -> int:
    """The exit code of `app` run on `arguments`: 2 for bad usage, else what the command says."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        text = " ".join(str(error).split())
        print(f"{app.name[0]}: error: {text} (see --help)", file=sys.stderr)
        return 2
    except KvxferError as error:
        print(f"{app.name[0]}: error: {error}", file=sys.stderr)
        return error.exit_code
    return int(code or 0)
