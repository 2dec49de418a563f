"""Cgroup arithmetic against small made-up process file systems, and the open-files limit."""

import os
import resource
from pathlib import Path

import pytest

from kvxfer.errors import UsageError
from kvxfer.memory.limits import OPEN_FILES_MARGIN, HostMemory, ensure_open_files

MIB = 1 << 20


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2_level(directory, limit, usage, inactive=0):
    write(directory / "memory.max", f"{limit}\n")
    write(directory / "memory.current", f"{usage}\n")
    write(directory / "memory.stat", f"anon 1\ninactive_file {inactive}\n")


def v1_level(directory, limit, usage, inactive=0):
    write(directory / "memory.limit_in_bytes", f"{limit}\n")
    write(directory / "memory.usage_in_bytes", f"{usage}\n")
    write(directory / "memory.stat", f"inactive_file 7\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def proc(tmp_path):
    """A procfs of a machine with 1000 MiB, 800 of them available, and a v2 mount."""

    def make(own="0::/", root="/", kind="cgroup2", options="rw"):
        mount = f"35 23 0:29 {root} {tmp_path}/cg rw,relatime shared:9 - {kind} none {options}\n"
        write(tmp_path / "meminfo", "MemTotal: 1024000 kB\nMemAvailable: 819200 kB\n")
        write(tmp_path / "self/cgroup", f"{own}\n")
        write(tmp_path / "self/mountinfo", f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mount}")
        (tmp_path / "cg").mkdir(exist_ok=True)
        return tmp_path

    return make


def measured(path):
    info = HostMemory(path).measure()
    return info.free_bytes // MIB, info.total_bytes // MIB


def test_without_a_limit_it_is_what_the_kernel_calls_available(proc):
    path = proc()
    assert measured(path) == (800, 1000)
    v2_level(path / "cg", "max", 5 * MIB)
    assert measured(path) == (800, 1000)


def test_a_v2_limit_counts_inactive_page_cache_as_free(proc):
    path = proc()
    v2_level(path / "cg", 300 * MIB, 250 * MIB, inactive=40 * MIB)
    assert measured(path) == (90, 300)


def test_the_tightest_ancestor_binds(proc):
    path = proc(own="0::/a/b/c")
    v2_level(path / "cg/a/b/c", 500 * MIB, 10 * MIB)
    v2_level(path / "cg/a/b", "max", 10 * MIB)
    v2_level(path / "cg/a", 600 * MIB, 580 * MIB)
    assert measured(path) == (20, 500)


def test_a_cgroup_beside_our_own_does_not_bind(proc):
    path = proc(own="0::/a")
    v2_level(path / "cg/b", 100 * MIB, 50 * MIB)
    assert measured(path) == (800, 1000)


def test_a_mount_that_shows_only_our_own_cgroup(proc):
    path = proc(own="0::/pods/x", root="/pods/x")
    v2_level(path / "cg", 300 * MIB, 100 * MIB)
    assert measured(path) == (200, 300)


def test_usage_above_the_limit_is_nothing_free(proc):
    path = proc()
    v2_level(path / "cg", 100 * MIB, 120 * MIB)
    assert measured(path) == (0, 100)


def test_v1_memory_controller(proc):
    path = proc(own="4:memory:/a\n0::/", kind="cgroup", options="rw,memory")
    v1_level(path / "cg/a", 300 * MIB, 290 * MIB, inactive=60 * MIB)
    v1_level(path / "cg", 9223372036854771712, 400 * MIB)
    assert measured(path) == (70, 300)


def test_other_v1_controllers_are_ignored(proc):
    path = proc(own="4:cpu:/a", kind="cgroup", options="rw,cpu")
    v1_level(path / "cg/a", 300 * MIB, 290 * MIB)
    assert measured(path) == (800, 1000)


def test_this_machine_can_be_measured():
    info = HostMemory().measure()
    assert 0 < info.free_bytes <= info.total_bytes


def open_count():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_soft_limit_is_raised_as_far_as_needed(in_child):
    def body():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = open_count() + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        ensure_open_files(300)
        raised, same_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == open_count() + 300 + OPEN_FILES_MARGIN
        assert same_hard == hard
        duplicates = [os.dup(0) for _ in range(300)]
        assert len(duplicates) == 300

    assert in_child(body) == 0


def test_enough_room_is_left_alone(in_child):
    def body():
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        ensure_open_files(0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before

    assert in_child(body) == 0


def test_a_hard_limit_that_is_too_low_is_a_usage_error(in_child):
    def body():
        limit = open_count() + 50
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with pytest.raises(UsageError, match="RLIMIT_NOFILE") as caught:
            ensure_open_files(1000)
        required = open_count() + 1000 + OPEN_FILES_MARGIN
        assert f"ulimit -Hn {required}" in str(caught.value)
        assert caught.value.value == limit
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, limit)

    assert in_child(body) == 0
