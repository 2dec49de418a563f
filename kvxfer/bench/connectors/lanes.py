"""The connectors that are measured: which, with what environment, and which way they move KV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from kvxfer.errors import UsageError
from kvxfer.transfer.connector import check_connectors

DEFAULT = ("nixl", "peer", "staged", "mooncake", "offload")
"""Loopback moves nothing between processes: its contract tests are its own measure."""
ACROSS = ("nixl", "staged", "mooncake")
"""Of those, the ones that reach another machine."""
STAGED = frozenset({"staged", "offload"})
"""Those that go through memory that is not the cache's."""
CHUNKS_ONLY = frozenset({"peer"})
"""Those that map the chunks of memory that grows: a plain allocation has none."""
NEEDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "nixl": (("nixl",), "pip install nixl==1.5.1"),
    "staged": (("nixl",), "pip install nixl==1.5.1"),
    "mooncake": (
        ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "pip install 'kvxfer[mooncake]'",
    ),
}
"""Distributions of which one must be installed, and how to get it."""
BACKEND = "KVXFER_NIXL_BACKEND"
"""As connectors/nixl_environment.py reads it."""
STORAGE_BACKENDS = ("GDS", "GDS_MT", "POSIX", "OBJ", "AZURE_BLOB", "GUSLI", "HF3FS", "INFINIA")
_WORD = re.compile(r"(?P<module>[a-z_][a-z0-9_]*)(?P<settings>(:[A-Z][A-Z0-9_]*=[^:,]*)*)")


@dataclass(frozen=True, slots=True)
class Lane:
    """A connector as the report calls it, the module, and what is added to its environment."""

    name: str
    module: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return "staged" if self.module in STAGED else "direct"

    def can_move(self, chunk_bytes: int) -> bool:
        """Whether it moves memory of such chunks; 0: one plain allocation."""
        return chunk_bytes > 0 or self.module not in CHUNKS_ONLY


def lanes_of(words: str, backend: str, *, is_far: bool = False) -> tuple[list[Lane], list[str]]:
    """Those to measure, and of those that could have been why they are not. `is_far`: between two
    machines.

    Raises UsageError where the user named one that is not there, with what to install.
    """
    if backend.upper() in STORAGE_BACKENDS:
        reason = "moves KV to files or objects, not between memories: see the connector offload"
        raise UsageError("backend", backend, reason)
    found: list[Lane] = []
    problems: list[str] = []
    for word in words.split(",") if words else ACROSS if is_far else DEFAULT:
        lane = _lane(word.strip(), backend)
        if is_far and lane.environment.keys() - {BACKEND}:
            reason = "settings do not travel: give them to both sides' environments"
            raise UsageError("connectors", lane.name, reason)
        if lane in found:
            raise UsageError("connectors", words, f"names {lane.name} twice")
        reason = why_missing(lane.module)
        if reason and words:
            raise UsageError("connectors", lane.name, reason)
        if reason:
            problems.append(f"{lane.name}: not measured: {reason}")
        else:
            found.append(lane)
    return found, problems


def why_missing(module: str) -> str:
    """Why the connector is not there, and how to get it, or ''. Imports nothing of it."""
    try:
        check_connectors(module)
    except UsageError as error:
        return error.reason
    distributions, hint = NEEDS.get(module, ((), ""))
    if distributions and not any(_is_installed(name) for name in distributions):
        return f"{' or '.join(distributions)} is not installed: {hint}"
    return ""


def _lane(word: str, backend: str) -> Lane:
    parts = _WORD.fullmatch(word)
    if parts is None:
        raise UsageError("connectors", word, "must be a module of connectors/, or NAME:VAR=VALUE")
    settings = [one.partition("=") for one in parts["settings"].split(":")[1:]]
    environment = {name: value for name, _, value in settings}
    name = word
    if parts["module"] == "nixl" and backend.upper() != "UCX" and BACKEND not in environment:
        environment[BACKEND] = backend
        name = f"{word}:{BACKEND}={backend}"
    return Lane(name, parts["module"], environment)


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
