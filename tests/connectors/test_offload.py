"""Storage as a connector: blocks kept and found again, and hand-overs by way of slots. What every
connector does is in tests/contracts."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.peer_process import plan_of
from support.peer_processes import KIB, MIB, MakePeer, descriptors_and_mappings

from connectors.handover_socket import Dialling
from connectors.offload import OffloadConnector
from connectors.offload_parcels import MAX_RUNS, Extents, parcels_of
from connectors.offload_slots import FILE_NAME, PAGE, slot_offset
from connectors.offload_tiers import open_tiers
from connectors.offload_wire import Failed, Load, Open, Refused, Store, Taken, Welcome, Wire
from kvxfer.errors import ConnectorError, UsageError
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.regions import Region

SIZE = 4 * MIB
MINE = Region(MIB, 2 * MIB)
BLOCK_KIB = 64
SLOT_BYTES = BLOCK_KIB * KIB
TIMEOUT_S = 20.0


class Side:
    """A connector over a window of random bytes, of which MINE is registered."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._buffer = VirtualBuffer(HostDriver(), SIZE)
        self._buffer.commit([(0, SIZE)])
        raw = (ctypes.c_uint8 * SIZE).from_address(self._buffer.base_address)
        self.bytes = np.ctypeslib.as_array(raw)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
        self.base = self._buffer.base_address
        window = MemoryWindow(self.base, SIZE, "cpu", self._buffer)
        self.connector = OffloadConnector(f"{name}-{seed}-{time.monotonic_ns()}", window)
        self.connector.register([MINE])

    @property
    def agent(self):
        return self.connector._offload()

    def meet(self, other: Side) -> None:
        told, invitation = other.connector.describe([MINE]), other.connector.invite()
        self.connector.connect(other.name, other.base, told, invitation)

    def end(self, ticket: int, *others: Side) -> str | None:
        """Of the only ticket: its error."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for other in others:
                other.connector.poll()
            for result in self.connector.poll():
                assert result.ticket == ticket
                return result.error
            time.sleep(0.0002)
        raise TimeoutError(f"ticket {ticket} did not end")

    def close(self) -> None:
        self.connector.close()
        self._buffer.close()


MakeSide = Callable[..., Side]


@pytest.fixture
def make(peer_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSide]:
    monkeypatch.setenv("KVXFER_OFFLOAD_BLOCK_KIB", str(BLOCK_KIB))
    monkeypatch.setenv("KVXFER_OFFLOAD_DISK_MIB", "4")
    before = descriptors_and_mappings()
    made: list[Side] = []

    def make_side(name: str = "left", seed: int = 1) -> Side:
        made.append(Side(name, seed))
        return made[-1]

    yield make_side
    for side in made:
        side.close()
    assert descriptors_and_mappings() == before
    assert list(peer_directory.iterdir()) == []


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All goes to the disk tier."""
    directory = tmp_path / "tiers"
    directory.mkdir()
    monkeypatch.setenv("KVXFER_OFFLOAD_DIR", str(directory))
    monkeypatch.setenv("KVXFER_OFFLOAD_HOST_MIB", "0")
    return directory


def scattered(seed: int, num_runs: int = 40, run_bytes: int = 1500) -> Extents:
    rng = np.random.default_rng(seed)
    places = rng.permutation(MINE.size // run_bytes)[:num_runs] * run_bytes + MINE.offset
    return Extents(places, np.full(num_runs, run_bytes, dtype=np.int64))


def held_by(side: Side, extents: Extents) -> bytes:
    pairs = zip(extents.offsets.tolist(), extents.sizes.tolist(), strict=True)
    return b"".join(side.bytes[offset : offset + size].tobytes() for offset, size in pairs)


def whole(source: Region, destination: Region):
    return plan_of([[source.offset, destination.offset, source.size]])


def test_blocks_are_kept_and_brought_back_to_other_places(make: MakeSide) -> None:
    side = make()
    stored = {bytes([n]) * 32: scattered(n) for n in range(6)}
    expected = {key: held_by(side, extents) for key, extents in stored.items()}
    assert side.end(side.connector.store(stored)) is None
    side.bytes[:] = 0
    places = {key: scattered(100 + n) for n, key in enumerate(stored)}
    for key, extents in places.items():
        assert side.end(side.connector.load({key: extents})) is None
        assert held_by(side, extents) == expected[key]
    assert side.connector.has([*stored, b"other"]) == 6
    assert side.connector.has([b"other", *stored]) == 0


def test_a_missing_block_is_named_and_nothing_of_it_comes(make: MakeSide) -> None:
    side = make()
    before = side.bytes.copy()
    error = side.end(side.connector.load({b"\x0f" * 4: scattered(1)}))
    assert error == "block 0f0f0f0f is not in the tiers"
    np.testing.assert_array_equal(side.bytes, before)


def test_who_starts_again_finds_the_blocks_of_before(make: MakeSide, disk: Path) -> None:
    first = make()
    expected = held_by(first, scattered(3))
    assert first.end(first.connector.store({b"key": scattered(3)})) is None
    second = make("right", 2)  # the first one's place is taken
    assert sorted(path.name for path in disk.iterdir()) == ["0", "1"]
    assert second.connector.has([b"key"]) == 0
    first.connector.close()
    third = make("third", 3)
    assert third.end(third.connector.load({b"key": scattered(4)})) is None
    assert held_by(third, scattered(4)) == expected


@pytest.mark.parametrize("way", Direction)
def test_a_hand_over_leaves_no_block_behind(make: MakeSide, disk: Path, way: Direction) -> None:
    left, right = make("left", 1), make("right", 2)
    left.meet(right)
    source, destination = (left, right) if way is Direction.PUSH else (right, left)
    expected = source.bytes[MINE.offset : MINE.end].copy()
    assert left.end(left.connector.submit("right", way, whole(MINE, MINE)), right) is None
    np.testing.assert_array_equal(destination.bytes[MINE.offset : MINE.end], expected)
    right.connector.poll()  # the last `Taken`
    for side in (left, right):
        assert len(side.agent.store.tiers[0]) == 0
        side.connector.close()
    for number in range(2):
        with (disk / str(number) / FILE_NAME).open("rb") as file:
            for slot in range(64):
                assert os.pread(file.fileno(), 120, slot_offset(SLOT_BYTES, slot)).count(0) == 120


def test_a_parcel_that_was_damaged_in_its_slot_does_not_arrive(make: MakeSide, disk: Path) -> None:
    left, right = make("left", 1), make("right", 2)
    left.meet(right)
    before = left.bytes.copy()
    size = SLOT_BYTES // 2
    plan = plan_of([[MINE.offset, MINE.offset, size]])
    ticket = left.connector.submit("right", Direction.PULL, plan)
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(right.agent.store.tiers[0]) == 0 and time.monotonic() < deadline_s:
        left.connector.poll()  # dials and asks; what the answer says is looked at by a later poll
        right.agent.guests.advance()
    file = right.agent.store.tiers[0].file
    place = slot_offset(SLOT_BYTES, 0) + PAGE + size // 2
    os.pwrite(file.fd, bytes([os.pread(file.fd, 1, place)[0] ^ 1]), place)
    error = left.end(ticket, right)
    assert error is not None and "slot 0 does not hold the parcel" in error
    np.testing.assert_array_equal(left.bytes, before)
    assert left.end(left.connector.submit("right", Direction.PULL, plan), right) is None


@pytest.mark.parametrize("way", Direction)
def test_without_a_free_slot_a_transfer_fails_and_the_next_does_not(
    make: MakeSide, disk: Path, way: Direction
) -> None:
    left, right = make("left", 1), make("right", 2)
    left.meet(right)
    store = (left if way is Direction.PUSH else right).agent.store
    held = [store.hold(bytes([n]), b"mine") for n in range(4 * MIB // SLOT_BYTES)]
    error = left.end(left.connector.submit("right", way, whole(MINE, MINE)), right)
    assert error is not None and "no slot for a parcel" in error
    for one in held:
        assert one is not None
        store.drop(one)
    assert left.end(left.connector.submit("right", way, whole(MINE, MINE)), right) is None


@pytest.mark.parametrize("way", Direction)
def test_slots_of_two_sizes(
    make: MakeSide, monkeypatch: pytest.MonkeyPatch, way: Direction
) -> None:
    left = make("left", 1)
    monkeypatch.setenv("KVXFER_OFFLOAD_BLOCK_KIB", "96")
    right = make("right", 2)
    left.meet(right)
    right.meet(left)
    for mover, other in ((left, right), (right, left)):
        source, destination = (mover, other) if way is Direction.PUSH else (other, mover)
        ticket = mover.connector.submit(other.name, way, whole(MINE, MINE))
        assert mover.end(ticket, other) is None
        np.testing.assert_array_equal(*(s.bytes[MINE.offset : MINE.end] for s in (source, other)))
        destination.bytes[MINE.offset : MINE.end] ^= 0xFF


def test_blocks_of_memory_that_is_not_registered_are_refused(make: MakeSide) -> None:
    side = make()
    for extents, said in (
        (Extents(np.array([0]), np.array([8])), "lie in no registered region"),
        (Extents(np.array([MINE.end - 4]), np.array([8])), "lie in no registered region"),
        (Extents(np.array([MINE.offset]), np.array([SLOT_BYTES + 1])), "must have 1 to 65536"),
        (Extents(np.array([MINE.offset] * 2), np.array([9, -1])), "must have 1 to 65536"),
    ):
        for act in (side.connector.store, side.connector.load):
            with pytest.raises(ConnectorError, match=said):
                act({b"key": extents})
    assert side.connector.poll() == []


class Stranger:
    """Speaks to a side as a peer that may say anything."""

    def __init__(self, side: Side, directory: Path) -> None:
        self._side = side
        name = next(directory.glob("*.peer")).name
        dialling = Dialling(directory, name)
        assert dialling.attempt()
        self.wire = Wire(dialling.socket)

    def hear(self):
        """The next frame; raises ConnectorError where it is the last."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.wire.flush()
            self._side.connector.poll()
            for frame in self.wire.hear():
                return frame
        raise TimeoutError


@pytest.fixture
def stranger(make: MakeSide, peer_directory: Path) -> Iterator[tuple[Side, Stranger]]:
    side = make()
    stranger = Stranger(side, peer_directory)
    yield side, stranger
    stranger.wire.close()


def test_who_was_not_invited_gets_no_tier(stranger: tuple[Side, Stranger]) -> None:
    side, wire = stranger[0], stranger[1].wire
    wire.say(Open(b"guessed", "stranger", SLOT_BYTES), [side.agent._tier_fds()[0]])
    with pytest.raises(ConnectorError, match="was not invited"):
        stranger[1].hear()
    assert wire.tiers == []


@pytest.mark.parametrize("frame", [Store(1, b""), Load(1, 0, 0, b"k", b""), Taken(1), Welcome(1)])
def test_what_is_said_out_of_turn_ends_the_connection(
    stranger: tuple[Side, Stranger], frame: Store | Load | Taken | Welcome
) -> None:
    stranger[1].wire.say(frame)
    with pytest.raises(ConnectorError, match=r"refused: .*(out of turn|descriptors came with)"):
        stranger[1].hear()


def test_a_tier_that_is_no_file_is_refused(stranger: tuple[Side, Stranger]) -> None:
    side, other = stranger
    read, write = os.pipe()
    other.wire.say(Open(side.connector.invite(), "stranger", SLOT_BYTES), [read])
    with pytest.raises(ConnectorError, match="a tier that is no file"):
        other.hear()
    os.close(read)
    os.close(write)


def test_a_guest_reaches_what_is_registered_and_nothing_else(
    stranger: tuple[Side, Stranger],
) -> None:
    side, other = stranger
    before = side.bytes.copy()
    tier = side.agent._tier_fds()[0]
    other.wire.say(Open(side.connector.invite(), "stranger", SLOT_BYTES), [tier])
    assert isinstance(other.hear(), Welcome)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(other.wire.tiers[0], b"x", 0)
    wrong = [
        (b"", "extents of 0 bytes"),
        (bytes(15), "extents of 15 bytes"),
        (Extents(np.array([0]), np.array([8])).to_bytes(), "lie in no registered region"),
        (Extents(np.array([MINE.end]), np.array([8])).to_bytes(), "lie in no registered region"),
        (Extents(np.array([-8]), np.array([8])).to_bytes(), "lie in no registered region"),
        (Extents(np.array([MINE.offset]), np.array([0])).to_bytes(), "do not fit a parcel"),
        (Extents(np.array([MINE.offset]), np.array([2**63 - 1])).to_bytes(), "do not fit a parcel"),
    ]
    for number, (extents, said) in enumerate(wrong):
        for frame in (Store(number, extents), Load(number, 0, 0, b"key", extents)):
            other.wire.say(frame)
            answer = other.hear()
            assert isinstance(answer, Failed) and said in answer.reason
    good = Extents(np.array([MINE.offset]), np.array([8])).to_bytes()
    for frame in (Load(50, 1, 0, b"key", good), Load(51, 0, 2**39, b"key", good)):
        other.wire.say(frame)
        answer = other.hear()
        assert isinstance(answer, Failed), answer
    np.testing.assert_array_equal(side.bytes, before)


def test_a_guest_that_takes_nothing_is_dropped_and_its_slots_are_free(
    stranger: tuple[Side, Stranger],
) -> None:
    side, other = stranger
    tier = side.agent._tier_fds()[0]
    other.wire.say(Open(side.connector.invite(), "stranger", SLOT_BYTES), [tier])
    good = Extents(np.array([MINE.offset]), np.array([8])).to_bytes()
    for number in range(65):
        other.wire.say(Store(number, good))
    with pytest.raises(ConnectorError, match="asked for more than 64 parcels at once"):
        while not isinstance(other.hear(), Refused):
            pass
    side.connector.poll()
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(side.agent.store.tiers[0]) and time.monotonic() < deadline_s:
        side.connector.poll()
    assert len(side.agent.store.tiers[0]) == 0


def test_memory_is_out_of_everybodys_hands_once_it_is_deregistered(
    make: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's push is under way, and slow, while we take the memory back."""
    left, right = make("left", 1), make("right", 2)
    left.meet(right)
    scatter = Extents.scatter

    def slowly(self: Extents, *arguments: object) -> None:
        time.sleep(0.1)
        scatter(self, *arguments)

    monkeypatch.setattr(Extents, "scatter", slowly)
    ticket = left.connector.submit("right", Direction.PUSH, whole(MINE, MINE))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not any(guest.at_work for guest in right.agent.guests._guests):
        left.connector.poll()
        right.connector.poll()
        assert time.monotonic() < deadline_s
    right.connector.deregister([MINE])
    found = right.bytes.copy()
    error = left.end(ticket, right)
    assert error is not None and "lie in no registered region" in error
    np.testing.assert_array_equal(right.bytes, found)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVXFER_OFFLOAD_BLOCK_KIB", "0", "must be a whole number from 1 to 65536"),
        ("KVXFER_OFFLOAD_BLOCK_KIB", "64k", "must be a whole number"),
        ("KVXFER_OFFLOAD_HOST_MIB", "-1", "must be a whole number from 0"),
        ("KVXFER_OFFLOAD_HOST_MIB", "0", "leaves no tier"),
        ("KVXFER_OFFLOAD_DIR", "/nowhere/at/all", "No such file or directory"),
        ("KVXFER_OFFLOAD_DIR", "/proc/self", "No such file or directory"),
    ],
)
def test_settings_that_are_none(
    make: MakeSide, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    before = descriptors_and_mappings()
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=said) as refused:
        open_tiers()
    assert str(refused.value).startswith(f"{variable}: {value!r}: ")
    assert descriptors_and_mappings() == before


def test_a_directory_of_other_blocks_is_refused(
    make: MakeSide, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().connector.close()
    monkeypatch.setenv("KVXFER_OFFLOAD_NAME", "another model")
    with pytest.raises(UsageError, match="holds blocks of another model, geometry or layout"):
        open_tiers()


def test_gpu_memory_is_refused(make: MakeSide) -> None:
    with pytest.raises(UsageError, match="offload stores host memory only"):
        OffloadConnector("gpu", MemoryWindow(1 << 40, SIZE, "cuda:0"))


def test_parcels_have_all_the_bytes_once_and_fit() -> None:
    rng = np.random.default_rng(3)
    sizes = np.concatenate([rng.integers(1, 3000, 50), rng.integers(1, 4, 1500)])
    places = np.cumsum(sizes + 5)
    runs = plan_of(np.stack([places, places[::-1].copy() + 7, sizes]).T.tolist()).runs
    moved: list[tuple[int, int, int]] = []
    for src, dst in parcels_of(runs, 10_000):
        assert src.total_bytes <= 10_000 and 0 < len(src.sizes) <= MAX_RUNS
        moved += zip(src.offsets.tolist(), dst.offsets.tolist(), src.sizes.tolist(), strict=True)
    bytes_of = [(s + i, d + i) for s, d, size in moved for i in range(size)]
    columns = (runs.src_offsets.tolist(), runs.dst_offsets.tolist(), runs.sizes.tolist())
    wanted = [(s + i, d + i) for s, d, size in zip(*columns, strict=True) for i in range(size)]
    assert bytes_of == wanted


@pytest.mark.parametrize("way", ["pull", pytest.param("push", marks=pytest.mark.slow)])
def test_a_peer_that_is_killed_ends_its_transfers_and_nobody_else(
    make: MakeSide, make_peer: MakePeer, way: str
) -> None:
    left, other = make("left", 1), make("other", 2)
    left.meet(other)
    peer = make_peer(SIZE, 9, connector="offload")
    told = bytes.fromhex(peer.ask("grow", [MINE.offset, MINE.size]))
    left.connector.connect("peer", peer.base, told, bytes.fromhex(peer.ask("invite")))
    plan = whole(MINE, MINE)
    assert left.end(left.connector.submit("peer", Direction(way), plan)) is None
    tickets = [left.connector.submit("peer", Direction(way), plan) for _ in range(20)]
    left.connector.poll()
    peer.kill()
    errors: dict[int, str | None] = {}
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(errors) < len(tickets) and time.monotonic() < deadline_s:
        errors |= {result.ticket: result.error for result in left.connector.poll()}
    assert set(errors) == set(tickets)
    assert errors[tickets[-1]] is not None and "lost" in errors[tickets[-1]]
    assert len(left.agent.store.tiers[0]) == 0
    assert left.end(left.connector.submit("other", Direction(way), plan), other) is None
    make("next", 3)  # removes the socket that the killed process left
