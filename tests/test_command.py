"""Commands end with 0, 1 or 2, in one line, and never in a traceback."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cyclopts
import pytest
from cyclopts import Parameter

from kvxfer.command import run_app, run_command
from kvxfer.config import WorkerOptions
from kvxfer.errors import KvxferError, UsageError, WorkerDied


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    size: int = 1
    kind: Literal["a", "b"] = "a"
    ratio: float = 0.5


def make_app(body):
    app = cyclopts.App(name="tool", result_action="return_value")

    @app.default
    def command(options: Options = Options()) -> int | None:
        """What it does."""
        return body(options)

    return app


@pytest.mark.parametrize("returned, code", [(0, 0), (None, 0), (1, 1), (7, 7)])
def test_the_exit_code_is_what_the_command_returns(capsys, returned, code):
    assert run_app(make_app(lambda options: returned), []) == code
    assert capsys.readouterr() == ("", "")


def test_flags_reach_the_command():
    seen = []
    run_app(make_app(seen.append), ["--size", "3", "--kind", "b", "--ratio", "0.25"])
    assert seen == [Options(size=3, kind="b", ratio=0.25)]


BAD = [
    (["--size", "many"], ("size", "many")),
    (["--kind", "c"], ("kind", "c")),
    (["--no-such"], ("--no-such",)),
    (["--size"], ("size",)),
    (["stray words", "--size", "1"], ("stray",)),
]


@pytest.mark.parametrize("arguments, mentioned", BAD)
def test_bad_usage_is_2_and_one_line(capsys, arguments, mentioned):
    assert run_app(make_app(lambda options: 0), arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("tool: error: ")
    assert all(word in err for word in mentioned)


def raises(error):
    def body(options):
        raise error

    return body


ERRORS = [
    (KvxferError("it broke"), 1, "it broke"),
    (UsageError("size", 3, "is odd"), 2, "size: 3: is odd"),
    (WorkerDied("decode ended", exit_code=5), 5, "decode ended"),
]


@pytest.mark.parametrize("error, code, text", ERRORS)
def test_our_errors_are_one_line_and_their_code(capsys, error, code, text):
    assert run_app(make_app(raises(error)), []) == code
    assert capsys.readouterr().err == f"tool: error: {text}\n"


def test_a_bug_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_app(make_app(raises(ZeroDivisionError())), [])


def test_help_is_0_and_on_stdout(capsys):
    assert run_app(make_app(lambda options: 1), ["--help"]) == 0
    out, err = capsys.readouterr()
    assert "What it does." in out
    assert "--kind" in out
    assert err == ""


def test_a_program_of_no_table_reads_what_is_for_all(monkeypatch, tmp_path):
    file = tmp_path / "kvxfer.toml"
    file.write_text('model = "m"\nblock_size = 8\n[prefill]\nblock_size = 4\n')
    found = []

    def program(options: WorkerOptions) -> int:
        found.append((options.model, options.block_size))
        return 0

    monkeypatch.setattr("sys.argv", ["program", "--config", str(file)])
    with pytest.raises(SystemExit) as exit_:
        run_command(program, "python -m program")
    assert (exit_.value.code, found) == (0, [(Path("m"), 8)])


@pytest.mark.parametrize("argv, code", [([], 3), (["--size", "x"], 2), (["--size", "9"], 1)])
def test_a_program_of_one_command_exits(monkeypatch, capsys, argv, code):
    def program(options: Options = Options()) -> int:
        if options.size == 9:
            raise KvxferError("nine")
        return 3

    monkeypatch.setattr("sys.argv", ["program", *argv])
    with pytest.raises(SystemExit) as exit_:
        run_command(program, "python -m program")
    assert exit_.value.code == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") == (code != 3)
