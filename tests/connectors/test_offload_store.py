"""Blocks in two tiers: which are kept, and that none is ever another than was put."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.offload_slots import FILE_NAME, PAGE, SlotFile, slot_offset
from connectors.offload_store import BlockStore
from kvxfer.errors import KvxferError, UsageError

SLOT_BYTES = 6000
"""Of a block, so that one takes two pages and a part of the second is nobody's."""
WHOSE = "a model, LBHNC, 16 tokens"
KEYS = [sha256(bytes([n])).digest() for n in range(8)]


def block_of(key: bytes, size_bytes: int = SLOT_BYTES) -> bytes:
    """What the key stands for."""
    return random.Random(key).randbytes(size_bytes)


@contextmanager
def store_in(directory: Path, host: int, disk: int, whose: str = WHOSE) -> Iterator[BlockStore]:
    """With so many slots; no tier where there are none."""
    store = open_store(directory, host, disk, whose)
    try:
        yield store
    finally:
        store.close()


def open_store(directory: Path, host: int, disk: int, whose: str = WHOSE) -> BlockStore:
    files = [SlotFile.in_memory(SLOT_BYTES, host)] if host else []
    if disk:
        files.append(SlotFile.in_directory(directory, SLOT_BYTES, disk, whose))
    return BlockStore(*files)


class Reference:
    """Which keys are where, by two dicts in the order of use."""

    def __init__(self, host: int, disk: int) -> None:
        self.room = [host, disk]
        self.held: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]

    def put(self, key: int) -> None:
        if key in self.held[0]:
            self.held[0].move_to_end(key)
        else:
            self._insert(0, key)

    def get(self, key: int) -> bool:
        for held in self.held:
            if key in held:
                held.move_to_end(key)
                self.put(key)
                return True
        return False

    def _insert(self, tier: int, key: int) -> None:
        if tier == 1 and key in self.held[1]:
            self.held[1].move_to_end(key)
            return
        if len(self.held[tier]) == self.room[tier]:
            victim, _ = self.held[tier].popitem(last=False)
            if tier == 0:
                self._insert(1, victim)
        self.held[tier][key] = None


@given(
    host=st.integers(1, 3),
    disk=st.integers(1, 4),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, len(KEYS) - 1)), max_size=40),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_keeps_what_two_lists_in_order_of_use_keep(
    tmp_path_factory: pytest.TempPathFactory,
    host: int,
    disk: int,
    steps: list[tuple[bool, int]],
) -> None:
    directory, expected = tmp_path_factory.mktemp("tier"), Reference(host, disk)
    with store_in(directory, host, disk) as store:
        for is_put, index in steps:
            key = KEYS[index]
            if is_put:
                assert store.put(key, block_of(key))
                expected.put(index)
            else:
                found = store.get(key)
                assert (found is not None) == expected.get(index)
                assert found is None or found == block_of(key)
            for tier, held in zip(store.tiers, expected.held, strict=True):
                assert tier.keys == [KEYS[one] for one in held]
        assert store.counts.damaged == store.counts.failed == 0
    assert (directory / FILE_NAME).stat().st_size == slot_offset(SLOT_BYTES, disk)


def test_what_the_host_tier_held_is_there_after_a_restart(tmp_path: Path) -> None:
    sizes = {key: 1 + 700 * n for n, key in enumerate(KEYS)}
    with store_in(tmp_path, host=4, disk=6) as store:
        for key in KEYS:
            assert store.put(key, block_of(key, sizes[key]))
    with store_in(tmp_path, host=4, disk=6) as store:
        assert [store.get(key) for key in KEYS[:2]] == [None, None]
        assert [store.get(key) for key in KEYS[2:]] == [block_of(k, sizes[k]) for k in KEYS[2:]]
        assert (store.counts.misses, store.counts.hits) == (2, 6)


def test_the_least_recently_written_goes_first_after_a_restart(tmp_path: Path) -> None:
    order = [KEYS[n] for n in (3, 0, 2, 1)]
    with store_in(tmp_path, host=0, disk=4) as store:
        for key in order:
            store.put(key, block_of(key))
    with store_in(tmp_path, host=0, disk=4) as store:
        assert store.tiers[0].keys == order
        store.put(KEYS[5], block_of(KEYS[5]))
        assert store.tiers[0].keys == [*order[1:], KEYS[5]]


def test_a_held_block_is_not_evicted_and_is_nowhere_once_dropped(tmp_path: Path) -> None:
    with store_in(tmp_path, host=0, disk=2) as store:
        held = [store.hold(key, block_of(key)) for key in KEYS[:2]]
        assert None not in held
        assert store.hold(KEYS[2], block_of(KEYS[2])) is None
        assert not store.put(KEYS[3], block_of(KEYS[3]))
        for one in held:
            assert one is not None
            store.drop(one)
            store.drop(one)
        assert store.get(KEYS[0]) is None
        assert store.put(KEYS[3], block_of(KEYS[3]))
    with store_in(tmp_path, host=0, disk=2) as store:
        assert store.tiers[0].keys == [KEYS[3]]


@pytest.mark.parametrize("size_bytes", [1, SLOT_BYTES])
def test_every_flipped_byte_of_a_slot_makes_a_miss(tmp_path: Path, size_bytes: int) -> None:
    """But for those that belong to nobody: then the block is what it was."""
    key, block = KEYS[0], block_of(KEYS[0], size_bytes)
    with store_in(tmp_path, host=0, disk=1) as store:
        store.put(key, block)
    used = 120  # of a header
    places = [*range(used), PAGE, PAGE + size_bytes // 2, PAGE + size_bytes - 1]
    unused = [used, PAGE - 1, PAGE + size_bytes]
    with (tmp_path / FILE_NAME).open("r+b") as file:
        for place in (*places, *unused):
            flip(file.fileno(), slot_offset(SLOT_BYTES, 0) + place)
            with store_in(tmp_path, host=0, disk=1) as store:
                assert store.get(key) == (None if place in places else block), place
            flip(file.fileno(), slot_offset(SLOT_BYTES, 0) + place)
    with store_in(tmp_path, host=0, disk=1) as store:
        assert store.get(key) == block


def flip(fd: int, offset: int) -> None:
    found = os.pread(fd, 1, offset)[0]
    assert os.pwrite(fd, bytes([found ^ 0x10]), offset) == 1


def test_a_block_damaged_while_the_store_is_open_is_lost_alone(tmp_path: Path) -> None:
    with store_in(tmp_path, host=0, disk=3) as store:
        for key in KEYS[:3]:
            store.put(key, block_of(key))
        slot = store.tiers[0].use(KEYS[1])
        assert slot is not None
        flip(store.tiers[0].file.fd, slot_offset(SLOT_BYTES, slot.slot) + PAGE + 17)
        assert [store.get(key) for key in KEYS[:3]] == [block_of(KEYS[0]), None, block_of(KEYS[2])]
        assert store.counts.damaged == 1 and not store.has(KEYS[1])
        assert store.put(KEYS[1], block_of(KEYS[1]))
        assert store.get(KEYS[1]) == block_of(KEYS[1])


def test_a_swapped_slot_is_no_block_of_the_other_key(tmp_path: Path) -> None:
    with store_in(tmp_path, host=0, disk=2) as store:
        for key in KEYS[:2]:
            store.put(key, block_of(key))
        file = store.tiers[0].file
        size = slot_offset(SLOT_BYTES, 1) - slot_offset(SLOT_BYTES, 0)
        slots = [os.pread(file.fd, size, slot_offset(SLOT_BYTES, n)) for n in (0, 1)]
        for n in (0, 1):
            os.pwrite(file.fd, slots[1 - n].ljust(size, b"\0"), slot_offset(SLOT_BYTES, n))
        assert [store.get(key) for key in KEYS[:2]] == [None, None]


@pytest.mark.parametrize("cut", ["in the last block", "in a header", "in the file's header"])
def test_a_cut_file(tmp_path: Path, cut: str) -> None:
    with store_in(tmp_path, host=0, disk=2) as store:
        for key in KEYS[:2]:
            store.put(key, block_of(key))
        first = [store.tiers[0].use(key).slot == 0 for key in KEYS[:2]].index(True)  # type: ignore[union-attr]
        left = {
            "in the last block": slot_offset(SLOT_BYTES, 1) + PAGE + 100,
            "in a header": slot_offset(SLOT_BYTES, 1) + 50,
            "in the file's header": 20,
        }[cut]
        os.truncate(tmp_path / FILE_NAME, left)
        kept = [KEYS[first]] if left > PAGE else []
        assert [key for key in KEYS[:2] if store.get(key)] == kept
        assert store.put(KEYS[2], block_of(KEYS[2]))
        assert store.get(KEYS[2]) == block_of(KEYS[2])
    if left < PAGE:
        with pytest.raises(UsageError, match=r"offload directory: .*damaged, or no file of ours"):
            open_store(tmp_path, host=0, disk=2)
        return
    with store_in(tmp_path, host=0, disk=2) as store:
        assert store.get(KEYS[2]) == block_of(KEYS[2])


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    with store_in(tmp_path, host=0, disk=1) as store:
        store.put(KEYS[0], block_of(KEYS[0]))
        code = (
            "from pathlib import Path\nfrom connectors.offload_slots import SlotFile\n"
            f"SlotFile.in_directory(Path({str(tmp_path)!r}), {SLOT_BYTES}, 1, {WHOSE!r})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert last.endswith(f"offload directory: {str(tmp_path)!r}: another process has it open")
        with pytest.raises(UsageError, match="another process has it open"):
            open_store(tmp_path, host=0, disk=1)
        assert store.get(KEYS[0]) == block_of(KEYS[0])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((SLOT_BYTES, 2, "another model"), "holds blocks of another model, geometry or layout"),
        ((SLOT_BYTES + 1, 2, WHOSE), "was made for block size 6000, not 6001"),
        ((SLOT_BYTES, 3, WHOSE), "was made for number of blocks 2, not 3"),
    ],
)
def test_a_directory_of_other_blocks_is_refused(
    tmp_path: Path, other: tuple[int, int, str], said: str
) -> None:
    with store_in(tmp_path, host=0, disk=2) as store:
        store.put(KEYS[0], block_of(KEYS[0]))
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(UsageError, match=said):
        SlotFile.in_directory(tmp_path, *other)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_file_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path, host=0, disk=1).close()
    monkeypatch.setattr("connectors.offload_slots.VERSION", 2)
    with pytest.raises(UsageError, match="was made for version 1, not 2"):
        open_store(tmp_path, host=0, disk=1)


@pytest.mark.parametrize("there", [None, "file", "somebody's"])
def test_a_directory_that_cannot_be_used(tmp_path: Path, there: str | None) -> None:
    directory = tmp_path / "tier"
    said = "No such file or directory"
    if there == "file":
        directory.write_text("")
        said = "Not a directory"
    if there == "somebody's":
        directory.mkdir()
        (directory / FILE_NAME).write_bytes(bytes(range(256)) * 40)
        said = "damaged, or no file of ours"
    with pytest.raises(UsageError, match=f"offload directory: .*{said}"):
        open_store(directory, host=0, disk=1)


def test_no_room_on_the_disk_is_a_miss_while_the_host_tier_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a limit on the size of files, which the kernel enforces as it does a full disk's."""
    with store_in(tmp_path, host=2, disk=6) as store:
        with file_limit(slot_offset(SLOT_BYTES, 2) + PAGE + 1000):  # the host tier fits
            for key in KEYS:
                assert store.put(key, block_of(key))
            assert [store.get(key) for key in KEYS[-2:]] == [block_of(key) for key in KEYS[-2:]]
            found = [(store.get(key), block_of(key)) for key in KEYS]
        assert all(got in (None, block) for got, block in found)
        assert any(got is None for got, _ in found) and store.counts.failed > 0
        assert "File too large" in caplog.text and "bytes could be written" in caplog.text
        failed = store.counts.failed
        for key in KEYS:
            assert store.put(key, block_of(key))
        assert store.tiers[1].has(KEYS[5]) and store.get(KEYS[5]) == block_of(KEYS[5])
        assert store.counts.failed == failed


@contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_must_not_grow_so_far_is_refused_at_once(tmp_path: Path) -> None:
    with file_limit(PAGE), pytest.raises(UsageError, match="File too large"):
        open_store(tmp_path, host=0, disk=4)


def test_a_full_file_system(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "kvxfer-test", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a file system here (needs root)")
    try:
        with store_in(place, host=0, disk=32) as store:
            kept = [key for key in KEYS if store.put(key, block_of(key))]
            assert 2 < len(kept) < len(KEYS)
            assert [key for key in KEYS if store.get(key) == block_of(key)] == kept
            assert store.counts.failed == len(KEYS) - len(kept)
            assert store.counts.damaged == 0
        with store_in(place, host=0, disk=32) as store:
            assert [key for key in KEYS if store.get(key) == block_of(key)] == kept
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("key", "block", "said"),
    [
        (b"", b"x", "key: '': must have 1 to 64 bytes"),
        (b"k" * 65, b"x", "must have 1 to 64 bytes"),
        (b"k", b"", "block: 0: must have 1 to 6000 bytes"),
        (b"k", bytes(6001), "block: 6001: must have 1 to 6000 bytes"),
    ],
)
def test_keys_and_blocks_that_are_none(tmp_path: Path, key: bytes, block: bytes, said: str) -> None:
    with store_in(tmp_path, host=1, disk=0) as store:
        for give in (store.put, store.hold):
            with pytest.raises(UsageError) as refused:
                give(key, block)
            assert said in str(refused.value)
        assert len(store.tiers[0]) == 0


def test_tiers_of_different_blocks_are_refused() -> None:
    files = [SlotFile.in_memory(size, 1) for size in (100, 200)]
    with pytest.raises(UsageError, match="must be the same in all tiers"):
        BlockStore(*files)
    for file in files:
        file.close()
        file.close()


def test_many_threads_get_what_was_put_or_nothing(tmp_path: Path) -> None:
    wrong: list[str] = []

    def work(store: BlockStore, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                key = rng.choice(KEYS)
                if rng.random() < 0.5:
                    store.put(key, block_of(key))
                elif store.get(key) not in (None, block_of(key)):
                    wrong.append(key.hex())
        except KvxferError as error:
            wrong.append(str(error))

    with store_in(tmp_path, host=2, disk=3) as store:
        threads = [threading.Thread(target=work, args=(store, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads) and not wrong
        assert store.counts.damaged == store.counts.failed == 0
        for tier in store.tiers:
            taken = {tier.use(key).slot for key in tier.keys}  # type: ignore[union-attr]
            free = {tier.take().slot for _ in range(tier.file.num_slots - len(tier))}  # type: ignore[union-attr]
            assert taken | free == set(range(tier.file.num_slots)) and not taken & free


WRITER = f"""
import random, sys
from hashlib import sha256
from itertools import count
from pathlib import Path
from connectors.offload_slots import SlotFile
from connectors.offload_store import BlockStore
store = BlockStore(SlotFile.in_directory(Path(sys.argv[1]), {1 << 20}, 6, "killed"))
blocks = [(key := sha256(bytes([n])).digest(), random.Random(key).randbytes({1 << 20}))
          for n in range(8)]
print("ready", flush=True)
for n in count():
    store.put(*blocks[n % 8])
"""


@pytest.mark.parametrize(
    "rounds", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_a_writer_that_is_killed_leaves_no_wrong_block(tmp_path: Path, rounds: int) -> None:
    """Eight blocks take turns in six slots, so that some slot is always being overwritten."""
    rng = random.Random(5)
    blocks = {key: block_of(key, 1 << 20) for key in KEYS}
    found = 0
    for _ in range(rounds):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        with writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.005, 0.04))
            writer.kill()
        store = BlockStore(SlotFile.in_directory(tmp_path, 1 << 20, 6, "killed"))
        try:
            for key, block in blocks.items():
                got = store.get(key)
                assert got is None or got == block
                found += got is not None
        finally:
            store.close()
    assert found >= 4 * rounds, "the blocks that were not being written are still there"


def test_a_block_written_in_part_is_a_miss_wherever_the_writer_was(tmp_path: Path) -> None:
    """Each beginning of what a write puts in place of another block, cut at any page and within
    the header."""
    directories = [tmp_path / name for name in ("old", "new")]
    for directory, key in zip(directories, KEYS, strict=False):
        directory.mkdir()
        with store_in(directory, host=0, disk=1) as store:
            store.put(key, block_of(key))
    old, new = ((directory / FILE_NAME).read_bytes() for directory in directories)
    start = slot_offset(SLOT_BYTES, 0)
    for done in (9, 40, 119, PAGE, PAGE + 1, PAGE + 4096, PAGE + SLOT_BYTES - 1):
        for torn in (
            new[: start + done] + old[start + done :],
            old[: start + done] + new[start + done :],
        ):
            (tmp_path / FILE_NAME).write_bytes(torn)
            with store_in(tmp_path, host=0, disk=1) as store:
                assert [store.get(key) for key in KEYS[:2]] == [None, None]
