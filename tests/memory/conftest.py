"""What every test of host memory leaves behind: nothing."""

import faulthandler
import gc
import os
import signal
import time
import traceback
from pathlib import Path

import pytest


def open_files():
    """Descriptor to what it is, without the one that lists them."""
    links = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue
    return {fd: link for fd, link in links.items() if "/fd" not in link}


def mappings(start=0, end=1 << 64):
    """(start, end, permissions, file) of this process's mappings, clipped to [start, end)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(text, 16) for text in fields[0].split("-"))
        if low < end and high > start:
            name = fields[5] if len(fields) > 5 else ""
            found.append((max(low, start), min(high, end), fields[1], name))
    return found


def chunk_mappings():
    return [entry for entry in mappings() if "memfd:kvxfer" in entry[3]]


def run_in_child(body):
    """Run `body()` in a forked child; 0 if it returned, 1 if it raised, -N if signal N ended it."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()  # a fault may be what the test is about
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("the child outlived its deadline")


@pytest.fixture
def in_child():
    return run_in_child


@pytest.fixture
def snapshot():
    """A function: everything about a VirtualBuffer that a failed call must leave as it was."""

    def take(buffer):
        base = buffer.base_address
        inside = mappings(base, base + buffer.size_bytes)
        return buffer.chunks, buffer.committed, inside, open_files()

    return take


@pytest.fixture
def mapped():
    return mappings


@pytest.fixture(scope="module", autouse=True)
def collected():
    """What tests elsewhere left to the collector (agents have files open) ends here, and not under
    a test that counts."""
    gc.collect()


@pytest.fixture(autouse=True)
def conserved(collected):
    before = open_files(), chunk_mappings()
    yield
    assert (open_files(), chunk_mappings()) == before
