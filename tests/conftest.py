"""Every test leaves the machine as it found it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.examples import SLOW
from support.fork_server import ForkServer
from support.forked import name_of

ROOT = Path(__file__).parent.parent
WORKER_MODULES = (
    *("prefill", "decode", "kvxfer.worker.single", "kvxfer.worker.rank_process"),
    *("kvxfer.bench.growth_worker", "kvxfer.bench.scale_agents", "prefill.watched"),
)
FORKED = {name_of(module) for module in WORKER_MODULES}
RUN_MARK = f"KVXFER_TEST_RUN={os.getpid()}"
"""In the environment of everything that this run starts."""

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is decorated
os.environ.update([RUN_MARK.split("=")])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--result-json", type=Path, help="write outcomes, machine and versions to this file"
    )
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--vllm", metavar="PYTHON", help="also run what needs vLLM, with this Python")
    parser.addoption(
        "--vllm-connector",
        choices=("kvxfer", "nixl"),
        default="kvxfer",
        help="of the tests that need vLLM",
    )
    parser.addoption("--commit", default="", help="the commit that a --result-json is of")
    parser.addoption(
        "--record",
        type=Path,
        metavar="DIR",
        help="write the figures of the fault campaigns that are run to DIR/control-*.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        os.environ[SLOW] = "1"
    directory: Path | None = config.getoption("--record")
    if directory is None:
        return
    if not directory.is_dir():
        raise pytest.UsageError(f"--record: {str(directory)!r} is no directory")
    if parts := [one for one in config.args if "::" in one]:
        raise pytest.UsageError(f"--record: {parts[0]!r} is a part; figures are of whole files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes long: give --slow"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Results of runs that CI cannot make, such as those on a GPU, are committed as JSON."""
    target: Path | None = config.getoption("--result-json")
    if target is None:
        return
    outcomes = {
        outcome: sorted(report.nodeid for report in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "error", "skipped")
    }
    record = {
        **{outcome: len(names) for outcome, names in outcomes.items()},
        "machine": machine(),
        "commit": config.getoption("--commit"),
        "outcomes": outcomes,
    }
    target.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> dict[str, str]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {
        name: version(name) for name in ("torch", "transformers", "nixl", "cuda-bindings", "pyzmq")
    }
    return {"python": platform.python_version(), "gpus": ", ".join(gpus) or "none", **versions}


def worker_processes() -> set[str]:
    """Worker processes that this test run has started, directly or not, and that are alive."""
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            name = (process / "comm").read_bytes().strip()
            environment = (process / "environ").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        is_worker = name in FORKED or any(f"-m {one} " in command for one in WORKER_MODULES)
        if is_worker and state != "Z" and RUN_MARK.encode() in environment:
            found.add(f"{process.name}: {command}")
    return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: PTH208


@pytest.fixture
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a worker process or shared memory."""
    processes, memory = worker_processes(), shared_memory()
    yield
    assert worker_processes() <= processes
    assert shared_memory() <= memory


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
