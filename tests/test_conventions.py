"""The conventions of this repository, executable."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvxfer", "connectors", "prefill", "decode")
TOP_LEVEL = {
    *PACKAGES,
    "tests",
    "deploy",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
}

LAYERS = (
    ("errors",),
    ("telemetry",),
    ("memory",),
    ("cache",),
    ("transfer",),
    ("control",),
    ("model",),
    ("config",),
    ("config_file",),
    ("command",),
    ("worker",),
    ("launch", "doctor"),
    ("serve",),
    ("bench",),
    ("demo",),
    ("cli",),
)
"""Rooms of kvxfer from the bottom up: a room imports only what stands below it, or itself."""

VENDOR_ROOMS = {
    "nixl": ("connectors/nixl",),
    "mooncake": ("connectors/mooncake",),
    "xxhash": ("connectors/offload",),
    "triton": ("connectors/gather.py", "kvxfer/model/", "kvxfer/transfer/checksum_kernel.py"),
    "cuda": ("kvxfer/memory/",),
    "hip": ("kvxfer/memory/",),
    "pynvml": ("kvxfer/memory/",),
    "zmq": ("kvxfer/control/",),
    "transformers": ("kvxfer/model/",),
    "tokenizers": ("kvxfer/model/",),
    "safetensors": ("kvxfer/model/",),
    "jinja2": ("kvxfer/model/", "kvxfer/bench/connectors/html.py"),
    "ray": ("kvxfer/launch/ray.py",),
    "starlette": ("kvxfer/serve/",),
    "uvicorn": ("kvxfer/serve/",),
    "prometheus_client": ("kvxfer/telemetry/", "connectors/vllm/metrics.py"),
    "vllm": ("connectors/vllm/",),
    "opentelemetry": ("kvxfer/telemetry/",),
    "cyclopts": ("kvxfer/config.py", "kvxfer/command.py", "kvxfer/cli.py", "kvxfer/demo/plan.py",
                 "kvxfer/serve/complete.py", "kvxfer/serve/options.py",
                 "kvxfer/serve/status.py", "kvxfer/bench/", "prefill/__main__.py",
                 "decode/__main__.py", "decode/loaded.py", "decode/null.py"),
    "matplotlib": ("kvxfer/bench/",),
    "aiohttp": ("kvxfer/bench/serving/",),
    "rich": ("kvxfer/demo/screen.py", "kvxfer/bench/connectors/screen.py",
             "kvxfer/bench/comparison.py", "kvxfer/bench/growth_screen.py",
             "kvxfer/bench/serving/", "kvxfer/doctor/screen.py",
             "kvxfer/serve/progress.py", "kvxfer/serve/status_screen.py"),
}  # fmt: skip

PURE = ("kvxfer/cache/layout.py", "kvxfer/cache/spec.py", "kvxfer/transfer/plan.py")
"""May import numpy and nothing else from outside."""


SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions and TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room(module: str) -> int | None:
    """The layer of a module of kvxfer."""
    parts = module.split(".")
    if parts[0] != "kvxfer" or len(parts) < 2:
        return None
    for index, names in enumerate(LAYERS):
        if parts[1] in names:
            return index
    return None


def check_all(rule: Callable[[Path], Iterable[str]]) -> None:
    """Of every file `rule` tells what is wrong with it: nothing."""
    assert len(SOURCES) > 100
    assert [wrong for path in SOURCES for wrong in rule(path)] == []


def upward(path: Path) -> Iterator[str]:
    module = relative(path).removesuffix(".py").replace("/", ".")
    own = room(module)
    name = module.split(".")[1] if "." in module else module
    for imported in imports(path):
        other = room(imported)
        if own is None or other is None:
            continue
        sibling = imported.split(".")[1]
        if not (other < own or sibling == name):
            yield f"{module} imports {imported}, which stands above it"


def test_imports_go_down() -> None:
    check_all(upward)


def outward(path: Path) -> Iterator[str]:
    package = relative(path).split("/")[0]
    outside = {name for name in imports(path) if name.split(".")[0] in PACKAGES}
    if relative(path).startswith("connectors/vllm/"):
        package = "connectors/vllm"
    allowed = {
        "kvxfer": ("kvxfer",),
        "prefill": ("kvxfer", "prefill"),
        "decode": ("kvxfer", "decode"),
        "connectors": (
            "connectors", "kvxfer.transfer", "kvxfer.memory.driver",
            "kvxfer.memory.extensible_tensor", "kvxfer.telemetry", "kvxfer.errors",
        ),
        # An engine's connector: it embeds the transfer layer, with a control plane of its own.
        "connectors/vllm": (
            "connectors.vllm", "kvxfer.transfer", "kvxfer.control", "kvxfer.cache",
            "kvxfer.worker.mailbox", "kvxfer.errors",
        ),
    }[package]  # fmt: skip
    for name in outside:
        if not (name.startswith(allowed) or name == "kvxfer"):
            yield f"{relative(path)} imports {name}"


def test_workers_and_connectors_keep_to_themselves() -> None:
    check_all(outward)


def vendors_elsewhere(path: Path) -> Iterator[str]:
    for name in {imported.split(".")[0] for imported in imports(path)}:
        rooms = VENDOR_ROOMS.get(name.removesuffix("_cu12").removesuffix("_cu13"))
        if rooms is not None and not relative(path).startswith(rooms):
            yield f"{relative(path)} imports {name}"


def test_vendors_stay_in_their_rooms() -> None:
    check_all(vendors_elsewhere)


def test_no_import_hides_in_a_string() -> None:
    """importlib is for connectors, by name, in one place."""
    found = [relative(path) for path in SOURCES if "importlib" in imports(path)]
    assert found == ["kvxfer/transfer/connector.py"]


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_need_numpy_at_most(name: str) -> None:
    outside = {imported.split(".")[0] for imported in imports(ROOT / name)}
    outside -= {*sys.stdlib_module_names, "kvxfer", "numpy", "__future__"}
    assert not outside


def test_model_sees_neither_control_nor_transfer() -> None:
    for path in (ROOT / "kvxfer" / "model").rglob("*.py"):
        seen = [n for n in imports(path) if n.startswith(("kvxfer.control", "kvxfer.transfer"))]
        assert not seen, f"{relative(path)} imports {seen}"


def wrong_doors(path: Path) -> Iterator[str]:
    listed = [
        ast.literal_eval(node.value)
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    if not listed:
        return
    if listed[0] != sorted(listed[0]):
        yield f"{relative(path)}: __all__ is not sorted"
    module = relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    exported = importlib.import_module(module)
    for name in listed[0]:
        if not hasattr(exported, name):
            yield f"{relative(path)} has no {name}"


def test_all_is_sorted_and_true() -> None:
    """Where a package has a door, it lists exactly what it imports, in order."""
    check_all(wrong_doors)


def test_light_processes_import_neither_torch_nor_transformers() -> None:
    """The CLI, the router and a worker's first second do without."""
    code = (
        "import sys, kvxfer.cli, kvxfer.demo.run, kvxfer.serve.router, prefill.__main__, "
        "decode.__main__; "
        "print([m for m in ('torch', 'transformers', 'nixl') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_top_level_holds_what_it_should() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_errors_are_drawn_at_the_top_of_their_file() -> None:
    from kvxfer import errors

    drawn = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.KvxferError):
            assert name in drawn, f"{name} is missing in the tree of kvxfer/errors.py"


def test_no_simple_queue_is_waited_for():
    """With a timeout it may wait for good (`kvxfer.worker.work_thread` has the fact)."""
    users = [path for path in SOURCES if "SimpleQueue[" in path.read_text()]
    assert users, "kvxfer/worker/mailbox.py has one"
    calls = {path.name: set(_calls(path)) & {"get"} for path in users}
    assert not any(calls.values()), f"get, where get_nowait belongs: {calls}"


def _calls(path: Path) -> Iterator[str]:
    """Names of the methods that a module calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr
