"""`kvxfer bench connectors`: which connector moves KV best between two processes, and how near it
comes to what the machine can do.

Two bare processes with real caches and the connectors that serving uses, and no model. Each
connector has processes of its own; one that fails is given up, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvxfer.bench.connectors.ceilings import Ceilings
from kvxfer.bench.connectors.journal import Journal, check_files
from kvxfer.bench.connectors.measure import Rounds, Samples, measure
from kvxfer.bench.connectors.memory import check_memory, free_memory
from kvxfer.bench.connectors.options import ConnectorsOptions
from kvxfer.bench.connectors.pair import ConnectorsPair
from kvxfer.bench.connectors.screen import Screen
from kvxfer.bench.connectors.sweep import Setting, Sweep, Trial, sweep_of
from kvxfer.errors import KvxferError, WorkerDied

MakePair = Callable[[tuple[str, str], dict[str, str]], ConnectorsPair]
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def run_connectors(options: ConnectorsOptions) -> int:
    """Measure, print, write; 1 where something that was to be measured was not, or not as a whole.
    Raises KvxferError."""
    if options.compare is not None:
        from kvxfer.bench.connectors.compare import compare_reports

        return compare_reports(*options.compare, as_json=False)
    if options.listen:
        from kvxfer.bench.connectors.listen import listen

        return listen(options)
    check_files(json=options.json, csv=options.csv, html=options.html, figures=options.figures)
    sweep = sweep_of(options, count_gpus())
    check_memory(sweep, free_memory(sweep.devices), is_far=bool(options.peer))
    with ExitStack() as undo:
        make_pair: MakePair = ConnectorsPair.between
        machine = _machine(sweep)
        if options.peer:
            from kvxfer.bench.connectors.dial import Far

            far = undo.enter_context(Far(options))
            make_pair, machine = far.make_pair, f"{machine} to {far.machine}"
        return _run(options, sweep, make_pair, machine)


def _run(options: ConnectorsOptions, sweep: Sweep, make_pair: MakePair, machine: str) -> int:
    from kvxfer.bench.connectors.figures import figures_of
    from kvxfer.bench.record import command_line
    from kvxfer.bench.report import write_figures

    ceilings = Ceilings(is_far=bool(options.peer))
    command = command_line("connectors", replace(options, csv=None, html=None, figures=None))
    journal = Journal(command, machine, sweep, ceilings, (options.json, options.csv))
    rounds = Rounds(options.warmup_iter, options.num_iter, options.check_consistency)
    is_complete = False
    with Screen(len(sweep.trials) * (rounds.warm_up + rounds.runs)) as screen:
        bench = Bench(rounds, bool(options.connectors), journal, ceilings, screen, make_pair)
        try:
            bench.run(sweep.trials)
            is_complete = journal.is_whole
        except KeyboardInterrupt:
            journal.problems.append("stopped by the user")
            raise
        finally:
            journal.write(is_complete=is_complete)
            report = journal.report(is_complete=is_complete)
            screen.show(report)
            if options.html is not None:
                from kvxfer.bench.connectors.html import write_html

                write_html(report, options.html)
    figures = figures_of(report, options.bar)
    if options.figures is not None:
        write_figures(options.figures, figures, report.command, report.machine)
    return 0 if is_complete and all(figure.ok for figure in figures) else 1


@dataclass(slots=True)
class Bench:
    """Trial after trial, with the processes that they need."""

    rounds: Rounds
    is_named: bool
    """The user named the connectors: one that does not work is a failure."""
    journal: Journal
    ceilings: Ceilings
    screen: Screen
    make_pair: MakePair
    _stack: ExitStack = field(default_factory=ExitStack)
    _pair: ConnectorsPair | None = None
    _open: tuple[object, ...] = ()
    """What `_pair` is of, and what is open in it."""

    def run(self, trials: Iterable[Trial]) -> None:
        """Raises what is no KvxferError, such as KeyboardInterrupt, with what was found kept."""
        given_up: dict[str, int] = {}
        steps = self.rounds.warm_up + self.rounds.runs
        with self._stack:
            for trial in trials:
                name = trial.lane.name
                if name in given_up:
                    given_up[name] += 1
                    self.screen.skip(steps)
                elif not self._try(trial):
                    given_up[name] = 0
                    self._let_go()
        for name, count in given_up.items():
            if count:
                self.journal.problems.append(f"{name}: given up: {count} more were not measured")

    def _try(self, trial: Trial) -> bool:
        """Whether the connector may go on."""
        samples = Samples()
        is_first = trial.lane.name not in {row.kind.connector for row in self.journal.rows}
        try:
            pair = self._ready(trial)
        except KvxferError as error:
            if is_first and not self.is_named and not isinstance(error, WorkerDied):
                self.journal.problems.append(f"{trial.lane.name}: does not work here: {error}")
            else:
                self._keep(trial, samples, str(error))
            return False
        if trial.direction not in pair.directions:
            self._leave_out(trial)
            return True
        try:
            on_run = self.screen.begin(trial)
            measure(pair, trial, self.rounds, self.ceilings, samples, on_run)
        except KvxferError as error:
            self._keep(trial, samples, _why(pair, error))
            return False
        except KeyboardInterrupt:
            self._keep(trial, samples, "stopped by the user")
            raise
        self._keep(trial, samples, "")
        return True

    def _keep(self, trial: Trial, samples: Samples, problem: str) -> None:
        if problem:
            total = self.rounds.runs
            problem = f"after {len(samples.runs)} of {total} runs: {problem}"
        self.journal.add(samples.row(trial, self.ceilings.name_of(trial), problem))

    def _leave_out(self, trial: Trial) -> None:
        problem = f"{trial.lane.name}: not measured: it does not {trial.direction}"
        if problem not in self.journal.problems:
            self.journal.problems.append(problem)
        self.screen.skip(self.rounds.warm_up + self.rounds.runs)

    def _ready(self, trial: Trial) -> ConnectorsPair:
        """The pair, with the trial's connector and caches open."""
        wanted: tuple[object, ...] = (trial.lane.name, trial.setting.devices)
        pair = self._pair
        if pair is None or self._open[:2] != wanted:
            self._let_go()
            made = self.make_pair(trial.setting.devices, dict(trial.lane.environment))
            self._pair = pair = self._stack.enter_context(made)
            self._open = wanted
        setting: Setting = trial.setting
        if self._open[2:] != (setting,):
            self._open = wanted  # nothing is, should this fail
            pair.open_setting(setting, trial.lane.module)
            self._open = (*wanted, setting)
        return pair

    def _let_go(self) -> None:
        self._pair = None
        self._stack.close()


def _why(pair: ConnectorsPair, error: KvxferError) -> str:
    """A transfer with a process that died fails in many ways: that it died is why."""
    try:
        pair.check_alive()
    except WorkerDied as died:
        return str(died)
    return str(error)


def count_gpus() -> int:
    """That torch sees. Where no driver is there it is not asked: to load it takes a second."""
    if not any(Path(node).exists() for node in GPU_NODES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _machine(sweep: Sweep) -> str:
    from kvxfer.bench.report import describe_machine

    gpus = [device for device in sweep.devices if device != "cpu"]
    machine = describe_machine(gpus[0] if gpus else "cpu")
    return machine if len(gpus) < 2 else f"{len(gpus)} × {machine}"
