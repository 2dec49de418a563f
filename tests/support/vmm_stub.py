"""Loads vmm_stub.c in place of libcuda or libamdhip64, in a process made for that.

A process that has the stub is marked by KVXFER_VMM_STUB=cuda|hip in its environment. To run one
by hand: KVXFER_VMM_STUB=cuda python -m pytest tests/contracts/test_vmm_driver.py
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "KVXFER_VMM_STUB"
VENDOR = os.environ.get(VARIABLE)
"""The vendor whose library this process has a stub of, or None."""

ROOT = Path(__file__).parents[2]
FILES = {"cuda": ("libcuda.so.1", "libcuda.so.1"), "hip": ("libamdhip64.so", "libamdhip64.so.7")}
"""File name and SONAME: by the first the HIP driver finds a loaded copy, by the second the dynamic
linker takes the loaded library for the one that cuda.bindings asks for."""
TIMEOUT_S = 90


class Stub:
    """The loaded library and what it knows about its own use."""

    def __init__(self, library: ctypes.CDLL, vendor: str) -> None:
        self._library = library
        self._library.stub_log.restype = ctypes.c_char_p
        self._library.stub_last_handle.restype = ctypes.c_size_t
        self.vendor = vendor
        self.prefix = {"cuda": "cu", "hip": "hip"}[vendor]

    def reset(self) -> None:
        self._library.stub_reset()

    def log(self) -> list[str]:
        """Entry points in the order of their calls, since `reset`."""
        return str(self._library.stub_log().decode()).split()

    def live(self) -> dict[str, int]:
        names = ("handles", "allocations", "mappings", "reservations")
        return {name: getattr(self._library, f"stub_live_{name}")() for name in names}

    def current_device(self) -> int:
        return int(self._library.stub_current_device())

    def last_handle(self) -> int:
        return int(self._library.stub_last_handle())

    @contextmanager
    def failing(self, entry: str, nth: int = 1, code: int = 999) -> Iterator[None]:
        """The `nth` call of `entry` from here on, each if 0, returns `code` and does nothing."""
        self.reset()
        os.environ["STUB_FAIL"] = f"{entry}:{nth}:{code}"
        try:
            yield
        finally:
            del os.environ["STUB_FAIL"]


@functools.cache
def loaded_stub() -> Stub:
    """The stub of VENDOR, loaded before anything asks for the real library."""
    assert VENDOR is not None
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    name, soname = FILES[VENDOR]
    source = Path(__file__).with_name("vmm_stub.c")
    flags = ["-DHIP"] if VENDOR == "hip" else []
    warnings = ["-Wall", "-Wextra", "-Werror"]
    options = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{soname}"]
    command = ["gcc", *flags, *warnings, *options, "-o", str(directory / name), str(source)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return Stub(ctypes.CDLL(str(directory / name), ctypes.RTLD_GLOBAL), VENDOR)


@contextmanager
def run_over_stub(vendor: str, files: list[Path]) -> Iterator[Callable[[], tuple[bool, str]]]:
    """Runs the tests in `files` in a process with the stub, meanwhile.

    Yields a function that waits for it: whether all passed, none skipped, and its output.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    environment = {**os.environ, VARIABLE: vendor}
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as child,
    ):

        def finish() -> tuple[bool, str]:
            code = child.wait(TIMEOUT_S)
            output.seek(0)
            text = output.read()
            summary = (text.strip().splitlines() or [""])[-1]
            return code == 0 and " passed" in summary and "skipped" not in summary, text

        try:
            yield finish
        finally:
            child.kill()
