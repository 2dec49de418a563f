"""Versions of Python and of the packages that matter."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from kvxfer.telemetry.checks import Check

OLDEST_PYTHON = (3, 11)

_NEEDED = ("kvxfer", "torch", "transformers", "nixl", "pyzmq", "msgspec", "numpy",
           "starlette", "uvicorn", "prometheus-client")  # fmt: skip
_FOR_GPUS = ("triton", "cuda-bindings")
NAMES = (*_NEEDED, *_FOR_GPUS)


def installed_versions() -> dict[str, str]:
    """Of `NAMES`; those that are not installed are missing."""
    found = {}
    for name in NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def package_checks(python: tuple[int, ...], found: Mapping[str, str], has_gpu: bool) -> list[Check]:
    """Pure. `python` is its version, `found` what `installed_versions` says."""
    text = ".".join(map(str, python[:3]))
    if tuple(python[:2]) < OLDEST_PYTHON:
        checks = [Check("python", "fail", text, "needs 3.11 or later")]
    else:
        checks = [Check("python", "ok", text, platform.python_implementation())]
    for name in _NEEDED:
        if name in found:
            checks.append(Check(name, "ok", found[name]))
        else:
            checks.append(Check(name, "fail", "not installed", f"pip install {name}"))
    for name in _FOR_GPUS:
        if name in found:
            checks.append(Check(name, "ok", found[name]))
        elif has_gpu:
            hint = f"GPU caches and kernels need it: pip install {name}"
            checks.append(Check(name, "warn", "not installed", hint))
        else:
            checks.append(Check(name, "ok", "not installed", "needed on GPUs only"))
    return checks


def packages() -> list[Check]:
    from kvxfer.doctor.devices import has_gpu_node

    return package_checks(sys.version_info[:3], installed_versions(), has_gpu_node())
