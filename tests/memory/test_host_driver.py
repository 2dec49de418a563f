"""What is particular to host memory: faults, zero pages, other processes, the system's limits."""

import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import DriverError, OutOfMemory, UsageError
from kvxfer.memory import host
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer

G = 64 * 1024

IMPORTER = """
import ctypes, socket, sys
from kvxfer.memory.host import HostDriver
sock = socket.socket(fileno=int(sys.argv[1]))
sock.settimeout(20)
message, (fd,), _, _ = socket.recv_fds(sock, 64, 1)
size = int(message)
driver = HostDriver()
base = driver.reserve(size)
handle = driver.import_(fd, base, size)
seen = ctypes.string_at(base, 6)
ctypes.memmove(base + size - 5, b"child", 5)
driver.decommit(base, size, handle)
driver.free(base, size)
sock.sendall(seen)
"""


@pytest.fixture
def driver():
    return HostDriver()


@pytest.fixture
def buffer(driver):
    with VirtualBuffer(driver, 64 * G, largest_chunk_bytes=G) as buffer:
        yield buffer


def is_backed(address):
    """Whether the kernel can read a byte at `address`: write(2) says EFAULT where it cannot."""
    reader, writer = os.pipe()
    try:
        return os.write(writer, (ctypes.c_char * 1).from_address(address)) == 1
    except OSError as error:
        assert error.errno == errno.EFAULT
        return False
    finally:
        os.close(reader)
        os.close(writer)


def test_exactly_the_committed_pages_are_backed(buffer):
    base = buffer.base_address
    (chunk,) = buffer.commit([(2 * G, G)])
    pages = range(base, base + 5 * G, mmap.PAGESIZE)
    backed = {page for page in pages if is_backed(page)}
    assert backed == set(range(base + 2 * G, base + 3 * G, mmap.PAGESIZE))
    buffer.decommit([chunk])
    assert not any(is_backed(page) for page in pages)


@pytest.mark.parametrize("offset", [0, 2 * G - 1, 3 * G])
def test_touching_an_uncommitted_byte_is_a_fault(buffer, in_child, offset):
    buffer.commit([(2 * G, G)])
    address = buffer.base_address + offset
    assert in_child(lambda: ctypes.string_at(address, 1)) == -signal.SIGSEGV
    assert in_child(lambda: ctypes.memset(address, 1, 1)) == -signal.SIGSEGV


def test_touching_a_decommitted_byte_is_a_fault(buffer, in_child):
    chunks = buffer.commit([(0, 3 * G)])
    address = buffer.base_address + G
    assert in_child(lambda: ctypes.memset(address, 1, 1)) == 0
    buffer.decommit([chunks[1]])
    assert in_child(lambda: ctypes.memset(address, 1, 1)) == -signal.SIGSEGV
    assert in_child(lambda: ctypes.memset(address + G, 1, 1)) == 0


def test_pages_are_zero_at_first_and_again_after_decommit(buffer):
    for _ in range(2):
        buffer.commit([(0, 2 * G)])
        assert not any(ctypes.string_at(buffer.base_address, 2 * G))
        ctypes.memset(buffer.base_address, 255, 2 * G)
        buffer.release_physical()


def test_a_reservation_is_gone_when_freed(driver, mapped):
    base = driver.reserve(1 << 40)
    assert mapped(base, base + (1 << 40))
    driver.free(base, 1 << 40)
    assert not mapped(base, base + (1 << 40))


def test_commit_populates_so_that_no_touch_can_fail_later(driver):
    size = 32 << 20
    with VirtualBuffer(driver, size) as buffer:
        (chunk,) = buffer.commit([(0, size)])
        assert os.fstat(chunk.handle).st_blocks * 512 == size


def test_another_process_sees_and_writes_the_same_bytes(buffer):
    (chunk,) = buffer.commit([(G, G)])
    address = buffer.base_address + G
    ctypes.memmove(address, b"parent", 6)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        command = [sys.executable, "-c", IMPORTER, str(theirs.fileno())]
        root = Path(host.__file__).parents[2]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=root) as child:
            theirs.close()
            fd = buffer.export(chunk)
            socket.send_fds(ours, [str(G).encode()], [fd])
            os.close(fd)
            assert ours.recv(64) == b"parent"
            assert child.wait(20) == 0
    assert ctypes.string_at(address + G - 5, 5) == b"child"


@pytest.mark.parametrize("announced", [G, 3 * G])
def test_an_import_of_another_size_than_announced_is_refused(driver, buffer, snapshot, announced):
    buffer.commit([(0, G)])
    handle = driver.commit(buffer.base_address + 8 * G, 2 * G)
    fd = driver.export(handle)
    before = snapshot(buffer)
    with pytest.raises(DriverError, match=f"holds {2 * G} bytes, {announced} were announced"):
        driver.import_(fd, buffer.base_address + 16 * G, announced)
    assert snapshot(buffer) == before
    os.close(fd)
    driver.decommit(buffer.base_address + 8 * G, 2 * G, handle)


def test_an_import_that_its_exporter_could_cut_short_is_refused(driver, buffer):
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, G)
    with pytest.raises(DriverError, match="not sealed"):
        driver.import_(fd, buffer.base_address, G)
    os.close(fd)


def test_who_reads_only_cannot_write(driver, buffer, in_child):
    (chunk,) = buffer.commit([(0, G)])
    address = buffer.base_address + 8 * G
    fd = buffer.export(chunk, writable=False)
    assert not os.get_inheritable(fd)
    with pytest.raises(DriverError, match="mmap"):
        driver.import_(fd, address, G)
    handle = driver.import_(fd, address, G, writable=False)
    os.close(fd)
    ctypes.memset(buffer.base_address, 5, G)
    assert ctypes.string_at(address, G) == bytes([5]) * G
    assert in_child(lambda: ctypes.memset(address, 6, 1)) == -signal.SIGSEGV
    assert in_child(lambda: ctypes.memset(buffer.base_address, 5, 1)) == 0
    driver.decommit(address, G, handle)


def test_an_exporter_cannot_cut_a_chunk_short(driver, buffer):
    (chunk,) = buffer.commit([(0, G)])
    with pytest.raises(PermissionError):
        os.truncate(chunk.handle, 0)


def test_an_exported_descriptor_is_not_inherited(buffer):
    (chunk,) = buffer.commit([(0, G)])
    fd = buffer.export(chunk)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_only_the_exact_chunk_can_be_decommitted(driver, buffer):
    first, second = buffer.commit([(0, 2 * G)])
    base = buffer.base_address
    for offset, size, handle in [(0, G, second.handle), (0, 2 * G, first.handle), (4 * G, G, 0)]:
        with pytest.raises(DriverError, match="no chunk"):
            driver.decommit(base + offset, size, handle)
    assert is_backed(base) and is_backed(base + G)


def test_a_reservation_with_chunks_cannot_be_freed(driver, buffer):
    buffer.commit([(0, G)])
    with pytest.raises(DriverError, match="without chunks"):
        driver.free(buffer.base_address, buffer.size_bytes)
    assert is_backed(buffer.base_address)


def test_too_few_open_files_undo_the_whole_commit_and_say_what_to_do(buffer, snapshot, in_child):
    def body():
        buffer.commit([(0, 2 * G)])
        before = snapshot(buffer)
        unused = sorted(set(range(10_000)) - before[3].keys())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused[8], hard))
        with pytest.raises(DriverError, match="ulimit -n") as caught:
            buffer.commit([(4 * G, 30 * G), (40 * G, 20 * G)])
        assert caught.value.code == errno.EMFILE
        assert snapshot(buffer) == before
        assert buffer.commit([(4 * G, G)])

    assert in_child(body) == 0


def test_too_many_mappings_undo_the_whole_commit_and_say_what_to_do(buffer, snapshot, in_child):
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 100_000:
        pytest.skip(f"vm.max_map_count is {limit}: too many mappings to make in a test")

    def body():
        buffer.commit([(0, 2 * G)])
        before = snapshot(buffer)
        libc = ctypes.CDLL(None)
        page = mmap.PAGESIZE
        filler = mmap.mmap(-1, 2 * limit * page, mmap.MAP_PRIVATE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(filler))
        # Every other page unreadable: each boundary is a mapping more, until there are too many.
        index = 1
        while libc.mprotect(ctypes.c_void_p(start + index * page), page, 0) == 0:
            index += 2
        with pytest.raises(DriverError, match="max_map_count") as caught:
            buffer.commit([(4 * G, 30 * G)])
        assert caught.value.code == errno.ENOMEM
        libc.mprotect(ctypes.c_void_p(start), len(filler), mmap.PROT_READ | mmap.PROT_WRITE)
        assert snapshot(buffer) == before
        assert buffer.commit([(4 * G, G)])

    assert in_child(body) == 0


def test_more_than_is_free_is_refused_before_anything_is_taken(driver):
    free = driver.memory_info().free_bytes
    with VirtualBuffer(driver, -(-2 * free // G) * G, largest_chunk_bytes=1 << 50) as buffer:
        with pytest.raises(OutOfMemory) as caught:
            buffer.commit([(0, buffer.size_bytes)])
        assert caught.value.requested_bytes > caught.value.free_bytes
        assert not buffer.chunks


@pytest.mark.parametrize("granularity", [0, 2048, 3 * 4096, -4096])
def test_a_granularity_must_be_whole_pages_and_a_power_of_two(granularity):
    with pytest.raises(UsageError, match="granularity"):
        HostDriver(granularity)
