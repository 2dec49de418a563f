"""`kvxfer bench scale`: one worker's control plane with many peers.

A prefill worker in a process of its own, as in service but for the model: its threads, and a cache
that really grows and shrinks, registered with and described by a real connector. Its peers are
simulated (`scale_peers` says what of them is real) in the process of this command, by real sockets,
on the same cores: what they take, the worker lacks.

| figure              | from … to                                                                  |
| ---                 | ---                                                                        |
| RegionsUpdate, from | the new memory is committed (registering and describing it, and the turn   |
| commit              | of the control thread, follow) … the peer that is told last has decoded it |
| …, from first send  | the first peer's message is given to its socket … the same                 |
| Hello to Welcome    | all say Hello at once … each, and the one that waits longest, is welcome   |
| CPU of the worker   | of its process, by kind of thread, as a share of one core                  |
| longest silence     | between two words of the worker's to one peer, while nothing happens       |

A p99 is over the growths of a run; of each growth the peer counts that was told last.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.bench.thread_times import KINDS, thread_times
from kvxfer.errors import UsageError
from kvxfer.launch.local import LocalLauncher

if TYPE_CHECKING:
    from kvxfer.bench.scale_peers import SimulatedPeers

CONNECTOR = "nixl"
START_TIMEOUT_S = 120.0
WAIT_TIMEOUT_S = 60.0
SETTLE_S = 2.0
"""After peers that had left came back: what a worker does about that is done by then."""
FULL_S = 1.0
"""Without a growth, a cache that grows twice a second is full."""
UPDATE_BAR_MS = 50.0
INITIAL_BLOCKS = 16


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What `kvxfer bench scale` may be told."""

    peers: int = 64
    """Simulated decode workers."""
    runs: int = 5
    """Registration storms, and series of growths."""
    growths: int = 40
    """Of each series. The cache grows by itself, twice a second; full, it is shrunk."""
    idle_s: float = 10.0
    """For how long to look at what the worker takes while nothing happens."""
    cache_bytes: int = 64 << 20
    """Of the worker's cache when it is full."""
    json: Path | None = None
    """Write the figures to this file."""


@dataclass(slots=True)
class Scale:
    """What was found; a list has a value for each run, a share is CPU seconds a second by kind of
    thread."""

    welcome_ms: dict[str, list[float]] = field(default_factory=lambda: {"last": [], "p50": []})
    update_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By what it is counted from and which part of the growths, as in 'commit, p99'."""
    alone: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    storms: list[dict[str, float]] = field(default_factory=list)
    silence_s: float = 0.0
    num_growths: int = 0
    untold: int = 0
    """Updates that some peer was not told of, peer by peer."""
    lost: int = 0
    """How often the worker lost a peer."""


def run_scale(options: ScaleOptions) -> int:
    """Run, print, write; 1 when a bar was missed. Raises KvxferError."""
    for name, least in (("peers", 1), ("runs", 1), ("growths", 2), ("cache_bytes", 1 << 18)):
        if getattr(options, name) < least:
            raise UsageError(name, getattr(options, name), f"must be at least {least}")
    if not 0 < options.idle_s <= 600:
        raise UsageError("idle_s", options.idle_s, "must be more than 0 and at most 600")
    record = Record(options.json, command_line("scale", options))
    record.machine = describe_machine("cpu")
    with ExitStack() as undo:
        found = _measure(options, undo)
    record.add(*_figures(options.peers, found))
    return record.exit_code


@dataclass(frozen=True, slots=True)
class _Scene:
    """The worker and its peers, who know its address and have said nothing."""

    pid: int
    peers: SimulatedPeers
    full_blocks: int
    stamps: Path

    def is_full(self) -> bool:
        """Whether the worker's cache can grow no further."""
        return self.peers.status()["blocks_total"] == self.full_blocks

    def share(self, act: Callable[[], object]) -> dict[str, float]:
        """CPU time that the worker took while `act` ran, as a part of one core, by kind of
        thread."""
        before, begin_s = thread_times(self.pid), time.monotonic()
        act()
        took_ns = (time.monotonic() - begin_s) * 1e9
        after = thread_times(self.pid)
        return {kind: (after[kind] - before[kind]) / took_ns for kind in KINDS}


def _start(options: ScaleOptions, undo: ExitStack, advance: Callable[[str], None]) -> _Scene:
    from kvxfer.bench.scale_agents import read_agents
    from kvxfer.bench.scale_peers import SimulatedPeers

    directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-scale-")))
    stamps, told = directory / "stamps", directory / "told"

    def on_step(name: str, text: str) -> None:
        if name == "agents":
            advance("agents of the peers")

    launcher = undo.enter_context(LocalLauncher(directory, on_step))
    worker = launcher.start("prefill", "prefill.watched", _worker_arguments(options, stamps))
    agents = launcher.start("agents", "kvxfer.bench.scale_agents", _agents_arguments(options, told))
    are_ready = lambda: worker.is_ready and agents.is_ready  # noqa: E731
    launcher.wait_for(are_ready, START_TIMEOUT_S, "start of the worker and its peers' agents")
    peers = undo.enter_context(SimulatedPeers(worker.address, WAIT_TIMEOUT_S, launcher.check))
    facts = peers.meet()
    for one in read_agents(told).facts(facts):
        peers.add(one)
    full_blocks = options.cache_bytes // facts.geometry.specs[0].block_bytes
    return _Scene(worker.process.pid, peers, full_blocks, stamps)


def _measure(options: ScaleOptions, undo: ExitStack) -> Scale:
    advance = undo.enter_context(_progress(options))
    scene, found = _start(options, undo, advance), Scale()
    peers = scene.peers
    peers.connect()
    peers.until(scene.is_full, "a cache that is full")
    found.alone = scene.share(lambda: peers.stay(options.idle_s))
    for run in range(options.runs):
        if run > 0:
            peers.leave()
        found.storms.append(scene.share(peers.greet))
        _note_welcomes(peers, found)
        advance("registration storms")
    if options.runs > 1:
        peers.stay(SETTLE_S)
    for peer in peers.all:
        peer.silence_s = 0.0
    found.idle = scene.share(lambda: peers.stay(options.idle_s))
    found.silence_s = max(peer.silence_s for peer in peers.all)
    for _ in range(options.runs):
        _grow(scene, options.growths, lambda: advance("growths"))
        _note_growths(scene, found)
    found.lost = peers.num_lost + options.peers - int(peers.status()["peers"])
    return found


def _worker_arguments(options: ScaleOptions, stamps: Path) -> list[str]:
    """A cache that is never free enough grows whenever it may."""
    return [
        *("--model", "pattern"),
        *("--worker-id", "prefill-0"),
        *("--device", "cpu"),
        *("--connector", CONNECTOR),
        *("--lane", "push"),
        "--no-lane-test",
        *("--kv-cache-memory-bytes", str(options.cache_bytes)),
        *("--kv-commit", "elastic"),
        *("--kv-initial-blocks", str(INITIAL_BLOCKS)),
        *("--kv-low-watermark", "0.99999"),
        *("--stamps", str(stamps)),
    ]


def _agents_arguments(options: ScaleOptions, found: Path) -> list[str]:
    return [
        *("--connector", CONNECTOR),
        *("--count", str(options.peers)),
        *("--incarnation", secrets.token_hex(4)),
        *("--found", str(found)),
    ]


def _note_welcomes(peers: SimulatedPeers, found: Scale) -> None:
    waits_ms = [1e3 * (peer.welcomed_s - peer.hello_s) for peer in peers.all]
    found.welcome_ms["last"].append(max(waits_ms))
    found.welcome_ms["p50"].append(statistics.median(waits_ms))


def _grow(scene: _Scene, count: int, advance: Callable[[], None]) -> None:
    """`count` growths, which `peers.told` has then."""
    peers, seen = scene.peers, 0
    peers.told.clear()
    while seen < count:
        if scene.is_full():
            peers.shrink([INITIAL_BLOCKS])
        peers.until(partial(_is_settled, peers, seen), "a growth of the worker")
        if len(peers.told) > seen:
            seen += 1
            advance()


def _is_settled(peers: SimulatedPeers, seen: int) -> bool:
    """Everybody was told of one growth more, or nobody is told anything any more."""
    newest = list(peers.told.values())[seen:]
    is_told = bool(newest) and len(newest[0]) == len(peers.all)
    return is_told or time.monotonic() - peers.told_s > FULL_S


def _note_growths(scene: _Scene, found: Scale) -> None:
    from kvxfer.bench.scale_worker import read_stamps

    stamps, num_peers = read_stamps(scene.stamps), len(scene.peers.all)
    since: dict[str, list[float]] = {"commit": [], "first send": []}
    for generation, told in scene.peers.told.items():
        found.num_growths += 1
        found.untold += num_peers - len(told)
        stamp, last_s = stamps[generation], max(told.values())
        since["commit"].append(1e3 * (last_s - stamp.committed_s))
        since["first send"].append(1e3 * (last_s - stamp.first_send_s))
    for name, samples in since.items():
        cuts = statistics.quantiles(samples, n=100, method="inclusive")
        found.update_ms[f"{name}, p99"].append(cuts[98])
        found.update_ms[f"{name}, p50"].append(cuts[49])


def _figures(num_peers: int, found: Scale) -> Iterator[Figure]:
    def of(name: str, samples: Sequence[float], unit: str, bar: float | None = None) -> Figure:
        return Figure.of(f"scale, {num_peers} peers: {name}", samples, unit, "lower", bar)

    for name, samples in found.update_ms.items():
        bar = UPDATE_BAR_MS if name.endswith("p99") else None
        yield of(f"RegionsUpdate to the last, from {name}", samples, "ms", bar)
    for name, samples in found.welcome_ms.items():
        yield of(f"Hello to Welcome, {name}", samples, "ms")
    yield of("longest silence", [found.silence_s], "s")
    shares = {"storm": found.storms, "heartbeats": [found.idle], "no peer yet": [found.alone]}
    for phase, every in shares.items():
        whole = [100 * sum(share.values()) for share in every]
        yield of(f"CPU of the worker, {phase}", whole, "%")
        for kind in KINDS:
            parts = [100 * share[kind] for share in every]
            yield of(f"CPU of the worker, {phase}: {kind}", parts, "%")
    yield of("updates not told", [found.untold], f"of {found.num_growths * num_peers}", 0.0)
    yield of("peers lost", [found.lost], "peers", 0.0)


@contextmanager
def _progress(options: ScaleOptions) -> Iterator[Callable[[str], None]]:
    """Call it with what has come one step further."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console()
    totals = {
        "agents of the peers": options.peers,
        "registration storms": options.runs,
        "growths": options.runs * options.growths,
    }
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, auto_refresh=console.is_terminal
    ) as progress:
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        yield lambda name: progress.advance(tasks[name])
