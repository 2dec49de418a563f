"""Run a typed function as a command: options from flags, KVXFER_* variables and a file, usage
errors in one line, exit codes.

| from                       | above                                                              |
| ---                        | ---                                                                |
| a flag                     | all else                                                           |
| KVXFER_NAME_OF_THE_OPTION  | the file; lists are separated by spaces or commas                  |
| --config FILE              | the default; see `kvxfer.config_file`                              |

Only commands with an option --config read variables and files. KVXFER_KV_CACHE_LAYOUT is read by
who decides layouts (`kvxfer.worker.layouts`), which says so in its log: it ranks the same.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import cyclopts
from cyclopts import Token

from kvxfer.config import LAYOUT_VARIABLE
from kvxfer.config_file import (
    HIDDEN,
    RAY_KEYS,
    WORKER_KEYS,
    Entry,
    entries_for,
    near,
    texts_of,
)
from kvxfer.errors import KvxferError, UsageError

PREFIX = "KVXFER_"


@dataclass(frozen=True)
class Settings:
    """Gives options without a flag what a variable or the file says; for `cyclopts.App.config`."""

    section: str = ""
    """Table of the file (default: the command's name)."""
    serve_as: str = ""
    """The worker of `kvxfer serve` whose table is to be read too."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __call__(
        self, app: cyclopts.App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection
    ) -> None:
        """Raises UsageError."""
        options = {_key(one): one for one in arguments if one.name.startswith("--")}
        if "config" not in options:
            return
        asked = options["config"].tokens
        text = asked[0].value if asked else self.environment.get(PREFIX + "CONFIG", "")
        known = options.keys() - HIDDEN
        self._check_variables(known)
        section = self.section or (commands[-1] if commands else "")
        entries = entries_for(section, known, Path(text), self.serve_as) if text else {}
        for key in known:
            if not options[key].tokens:
                self._fill(options[key], key, entries.get(key))
            _check_whole(options[key], key)

    def _fill(self, option: Any, key: str, entry: Entry | None) -> None:
        name = PREFIX + key.upper()
        variable = self.environment.get(name, "")
        kind, is_many = _kind(option.hint)
        if variable:
            if name != LAYOUT_VARIABLE:
                texts = variable.replace(",", " ").split() if is_many else [variable]
                _append(option, texts, name, "the environment")
        elif entry is not None:
            _append(option, texts_of(entry, kind, is_many), entry.key, entry.place)

    def _check_variables(self, known: set[str]) -> None:
        """A variable that looks like one of ours, misspelt, is no other program's."""
        every = {PREFIX + key.upper() for key in {*known, *WORKER_KEYS, *RAY_KEYS, "config"}}
        for name in self.environment.keys() - every:
            if name.startswith(PREFIX) and (hint := near(name, every, cutoff=0.93)):
                raise UsageError(name, self.environment[name], f"no such option{hint}")


def _key(option: Any) -> str:
    return str(option.name).removeprefix("--").replace("-", "_")


def _kind(hint: Any) -> tuple[type, bool]:
    """One of `WANTED`, and whether there may be several."""
    parts = (hint, *get_args(hint))
    kind = next((one for one in (bool, int, float) if one in parts), str)
    return kind, get_origin(hint) in (list, tuple)


def _check_whole(option: Any, key: str) -> None:
    """Raise UsageError for a fraction where a whole number is wanted: cyclopts would round it."""
    if _kind(option.hint)[0] is int:
        for token in option.tokens:
            if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+[eE].*)", token.value.strip()):
                raise UsageError(token.keyword or key, token.value, "must be a whole number")


def _append(option: Any, texts: Sequence[str], keyword: str, source: str) -> None:
    for index, text in enumerate(texts):
        option.append(Token(keyword=keyword, value=text, source=source, index=index))


def run_command(command: Callable[..., int], name: str, section: str = "") -> NoReturn:
    """A program of one command; its exit code is what `command` returns. `section` is its table of
    a configuration file."""
    sys.exit(run_app(_app(command, name, Settings(section)), sys.argv[1:]))


def parse(
    command: Callable[..., int], arguments: Sequence[str], settings: Settings
) -> Mapping[str, Any]:
    """The arguments that `command` would be called with. Raises UsageError or, which `run_app`
    takes as well, cyclopts' own."""
    app = _app(command, settings.section, settings)
    _, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return bound.arguments


def _app(command: Callable[..., int], name: str, settings: Settings) -> cyclopts.App:
    app = cyclopts.App(name=name, version_flags=[], config=[settings], result_action="return_value")
    app.default(command)
    return app


def run_app(app: cyclopts.App, arguments: Sequence[str]) -> int:
    """The exit code of `app` run on `arguments`: 2 for bad usage, else what the command says."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        print(f"{app.name[0]}: error: {_one_line(error)} (see --help)", file=sys.stderr)
        return 2
    except KvxferError as error:
        print(f"{app.name[0]}: error: {error}", file=sys.stderr)
        return error.exit_code
    return int(code or 0)


def _one_line(error: cyclopts.CycloptsError) -> str:
    return " ".join(str(error).split())
