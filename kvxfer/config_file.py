"""The configuration file: one TOML file for all commands, and what each takes from it.

| key                          | who reads it                                                     |
| ---                          | ---                                                              |
| at the top                   | each command that has an option of this name; it must be one of  |
|                              | some command                                                     |
| [prefill] [decode] [router]  | this command, and `serve` and `launch ray` for their workers and |
|                              | their router; above what stands at the top                       |

Keys are the flags without their dashes in front; - and _ are the same. In [prefill] and [decode],
`workers` is how many of them these two start, as their flags --prefill and --decode are.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvxfer.config import WorkerOptions
from kvxfer.errors import UsageError

STARTERS = frozenset({"serve", "ray"})
"""Commands that start workers, and a router in front of them."""
WORKERS = "workers"
ROLES = ("prefill", "decode", "router")

HIDDEN = frozenset({"config", "kv_cache_layout_override", "is_connector_named", "ready_fd"})
"""Not for files and variables."""
WORKER_KEYS = frozenset(field.name for field in fields(WorkerOptions)) - HIDDEN
HTTP_KEYS = frozenset(
    {
        "api_key", "chat_template", "enable_admin", "host", "max_concurrent_requests", "port",
        "served_model_name", "shutdown_timeout_s",
    }
)  # fmt: skip
"""Options of what serves HTTP, for those who must not import it (see `kvxfer.serve.options`)."""
ROUTER_KEYS = HTTP_KEYS | {
    "decode", "key_file", "log_format", "max_model_len", "model", "otlp_traces_endpoint",
    "peer_keys", "peer_timeout_s", "prefill", "request_timeout_s",
}  # fmt: skip
SERVE_KEYS = HTTP_KEYS | {"prefill", "decode", "start_timeout_s", "log_dir"}
RAY_KEYS = SERVE_KEYS | {
    "address", "num_cpus", "num_gpus", "placement_group_strategy", "placement_timeout_s",
}  # fmt: skip
TABLE_KEYS = {
    "prefill": WORKER_KEYS | {WORKERS},
    "decode": WORKER_KEYS | {WORKERS, "prefill"},
    "router": ROUTER_KEYS,
}


@dataclass(frozen=True)
class Entry:
    """A value of the file, with where it stands for whoever has to correct it."""

    key: str
    value: Any
    place: str
    """FILE, or FILE [table]."""

    def wrong(self, reason: str) -> UsageError:
        return UsageError(self.key, self.value, f"{reason} ({self.place})")


def plain(key: str) -> str:
    return key.replace("-", "_")


def read_toml(path: Path) -> dict[str, Any]:
    """Raises UsageError, with the line where it is no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError("config", str(path), error.strerror or str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("config", str(path), f"is not TOML: {error}") from None


def entries_for(
    section: str, known: Collection[str], path: Path, serve_as: str = ""
) -> dict[str, Entry]:
    """What the command `section`, with the options `known`, takes of a file, by plain key.

    STARTERS read [router] as their own and, for the worker that they start as `serve_as`, that
    table. Raises UsageError for a key that no command has there, and for one that is given twice.
    """
    content = read_toml(path)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for name in tables.keys() - set(ROLES):
        raise Entry(f"[{name}]", "a table", str(path)).wrong(f"no such table{near(name, ROLES)}")
    top = {key: value for key, value in content.items() if key not in tables}
    found = _entries(top, {*known, *WORKER_KEYS, *ROUTER_KEYS, *RAY_KEYS}, str(path))
    found = {key: entry for key, entry in found.items() if key in known}
    is_serve = section in STARTERS
    taken = (serve_as or "router") if is_serve else section
    for name, keys in TABLE_KEYS.items():
        allowed = keys - {*ROLES} if is_serve else keys | {*(known if name == section else ())}
        own = _entries(tables.get(name, {}), allowed, f"{path} [{name}]")
        count = own.pop(WORKERS, None)
        if is_serve and count is not None:
            found[name] = count
        if name == taken:
            found |= own
    return found


def _entries(table: Mapping[str, Any], known: Collection[str], place: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for key, value in table.items():
        entry = Entry(key, value, place)
        if plain(key) not in known:
            raise entry.wrong(f"no such option{near(plain(key), known)}")
        if plain(key) in found:
            raise entry.wrong(f"{found[plain(key)].key} says it too")
        found[plain(key)] = entry
    return found


def near(name: str, known: Collection[str], cutoff: float = 0.75) -> str:
    """', did you mean X?', or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return f", did you mean {close[0]}?" if close else ""


WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def texts_of(entry: Entry, kind: type, is_many: bool) -> list[str]:
    """The value as the words of a flag whose type is `kind`, one of `WANTED`.

    Raises UsageError for another type, and for a list where one value is wanted.
    """
    if isinstance(entry.value, list) and not is_many:
        raise entry.wrong("one value is wanted, not a list")
    values = entry.value if isinstance(entry.value, list) else [entry.value]
    fitting = (int, float) if kind is float else kind
    for value in values:
        if not isinstance(value, fitting) or isinstance(value, bool) is not (kind is bool):
            raise entry.wrong(f"{WANTED[kind]} is wanted")
    return [str(value).lower() if kind is bool else str(value) for value in values]
