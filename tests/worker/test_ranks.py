"""Two ranks of the bundled model: one process's tokens, growth on both or none, and their ends."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from support.comparing import BLOCK_SIZE, NEW_TOKENS, block_lists, run
from support.fixtures import num_open_files
from support.models import HostEngine
from support.ranked import RankedEngine

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.errors import (
    CacheError,
    DriverError,
    ModelError,
    NotFinite,
    RankFailed,
    TransferError,
    UsageError,
    WorkerDied,
)
from kvxfer.model import SampleSpec, inspect_model
from kvxfer.model.groups import Place
from kvxfer.model.runner import ModelRunner, SequenceStep
from kvxfer.model.tensor_parallel import TensorParallel
from kvxfer.model.tiny import MODEL_DIR
from kvxfer.worker.rank_host import RankHost
from kvxfer.worker.rank_process import answer
from kvxfer.worker.rank_wire import Call, decode, encode
from kvxfer.worker.ranks import RankGroup

CAPACITY = 4096
PROMPTS = [
    list(text) for text in (b"To be", b"KING. The night is long, and we have far to go; " * 2)
]
GLOO_FILES = 4
"""Of its loop, which stays."""
NOTICED_S = 10.0
"""A follower's end, at the latest."""


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What the groups held ends here, and not under a later test that counts files."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """One for all tests: a follower takes seconds to start. One of the last tests ends it."""
    files = num_open_files()
    group = RankGroup(["cpu", "cpu"])
    try:
        yield group
    finally:
        group.close()
    assert num_open_files() <= files + GLOO_FILES


@pytest.fixture(scope="module")
def engine(group: RankGroup) -> RankedEngine:
    engine = RankedEngine(group, MODEL_DIR, KVCacheLayout.BHLNC, CAPACITY)
    group.extend([32])
    return engine


@pytest.fixture(scope="module")
def single() -> HostEngine:
    runner = ModelRunner.load(inspect_model(MODEL_DIR), "cpu", "float32", 1)
    return HostEngine(runner, block_size=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("sample", "batch"), [(SampleSpec(), 1), (SampleSpec(0.8, 0.95, seed=11), 2)]
)
def test_tokens_are_those_of_a_single_process(engine, single, sample, batch):
    expected = run(single, PROMPTS, sample=sample, batch=2)
    found = run(engine, PROMPTS, sample=sample, batch=batch)
    assert [one.answer for one in found] == [one.answer for one in expected]
    assert all(len(one.answer) == NEW_TOKENS + 1 for one in expected)


def test_each_rank_holds_its_heads(group, engine, single):
    (spec,), (whole,) = engine.specs, single.specs
    assert (spec.num_kv_heads, whole.num_kv_heads) == (1, 2)
    prompt, blocks = PROMPTS[1], block_lists(PROMPTS)[1]
    one = single.prefill(prompt, blocks)
    parts = [engine.prefill(prompt, ids) for ids in (blocks, [block + 12 for block in blocks])]
    for mine, theirs in zip(engine.kv(parts[0]), single.kv(one), strict=True):
        torch.testing.assert_close(mine, theirs[:, :1], rtol=1e-4, atol=1e-4)
    first, again = (group.call("prompt_digests", part.tables, len(prompt)) for part in parts)
    assert first == again
    assert not set(first[0]) & set(first[1]), "two ranks hold the same heads"


def test_kv_that_is_not_finite_in_one_rank_costs_its_own_sequence_its_token(engine):
    lists = block_lists(PROMPTS)
    both = [engine.prefill(*pair) for pair in zip(PROMPTS, lists, strict=True)]
    steps = [engine.next_step(one) for one in both]
    whole = engine.runner.decode_step(steps)
    part = engine.views[0][1][lists[0][0]]
    kept = part.clone()
    part.fill_(torch.nan)
    with pytest.raises(NotFinite) as raised:
        engine.runner.decode_step(steps)
    assert raised.value.tokens == [None, whole[1]]
    part.copy_(kept)
    assert engine.runner.decode_step(steps) == whole, "the ranks are in step"


def test_a_layer_is_told_of_when_all_ranks_have_written_it(group, engine):
    """Rank 0 writes its part of the first layer at once; the other is stopped meanwhile."""
    follower, told, blocks = group._followers[0].process.pid, [], [1, 2, 3, 4, 5, 6, 7]
    group.call("erase_pattern", blocks)
    step = SequenceStep(PROMPTS[1], 0, engine.tables(blocks))
    thread = threading.Thread(target=engine.runner.prefill_chunk, args=(step, told.append))
    os.kill(follower, signal.SIGSTOP)
    try:
        thread.start()
        wait_for(lambda: bool(engine.views[0][0][1].any()), "rank 0 to write its first layer")
        time.sleep(0.2)
        early = list(told)
    finally:
        os.kill(follower, signal.SIGCONT)
        thread.join(NOTICED_S)
    assert not thread.is_alive()
    assert early == []
    assert told == [Place(0, layer) for layer in range(engine.specs[0].num_layers - 1)]


def test_what_all_ranks_refuse_harms_none(group, engine, single):
    tables = engine.tables([1])
    with pytest.raises(UsageError, match="vocabulary"):
        group.call("prefill_chunk", SequenceStep([1 << 20], 0, tables, SampleSpec()))
    with pytest.raises(ModelError, match="loaded already"):
        group.call("load", str(MODEL_DIR), "float32", 1)
    token = engine.prefill(PROMPTS[0], [1]).answer
    assert token == single.prefill(PROMPTS[0], [1]).answer


def test_growth_is_of_all_ranks_or_of_none(group, engine):
    before = committed(group)
    follower = group._followers[0].process.pid
    for pid in (follower, os.getpid()):
        with no_more_files(pid), pytest.raises(RankFailed, match="open file") as raised:
            group.extend([before[0] + 500])
        rank = 1 if pid == follower else 0
        assert (raised.value.rank, raised.value.kind) == (rank, DriverError.__name__)
        assert committed(group) == before
    backed = group.extend([before[0] + 500])
    assert backed == committed(group)
    assert backed[0] >= before[0] + 500


def committed(group: RankGroup) -> tuple[int, ...]:
    """The blocks that each rank has, which are as many as the other's."""
    mine, other = (cache.committed_blocks for cache in group.call("describe"))
    assert mine == other
    return mine


@contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """A process cannot open another file: each chunk of its cache would be one."""
    old = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
    lowest = next(fd for fd in range(used + 2) if not Path(f"/proc/{pid}/fd/{fd}").exists())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, old[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, old)


def test_growth_goes_on_beside_the_model(group, engine, single):
    """The two lines have threads of their own."""
    target = committed(group)[0] + 200
    grown: list[int] = []
    thread = threading.Thread(target=lambda: grown.extend(group.extend([target])))
    thread.start()
    found = engine.prefill(PROMPTS[1], [1, 2, 3, 4, 5, 6, 7])
    thread.join(NOTICED_S)
    assert grown
    assert grown[0] >= target
    assert found.answer == single.prefill(PROMPTS[1], [1, 2, 3, 4, 5, 6, 7]).answer


@pytest.mark.parametrize(
    ("line", "method", "arguments", "reason"),
    [
        ("model", "close", (), "no method close"),
        ("transfer", "prompt_digests", ([], 0), "no method prompt_digests on line transfer"),
        ("transfer", "prepare", (["many"],), "Expected `int`"),
        ("transfer", "prepare", ([1], 2), "length 1"),
        ("model", "prefill_chunk", ({"tokens": [], "start": 0, "tables": []},), "0 tokens"),
    ],
)
def test_only_what_the_table_says_is_run(tmp_path, line, method, arguments, reason):
    host = RankHost(TensorParallel(0, 1, tmp_path / "rendezvous"), "cpu")
    reply = answer(Call(7, method, msgspec.Raw(encode(arguments))), line, host)
    assert (reply.number, reply.error) == (7, "WireError")
    assert reason in reply.text


def test_what_a_call_needs_comes_first(tmp_path):
    host = RankHost(TensorParallel(0, 1, tmp_path / "rendezvous"), "cpu")
    reply = answer(Call(1, "prepare", msgspec.Raw(encode(([1],)))), "transfer", host)
    assert (reply.error, reply.text) == ("CacheError", "no cache was reserved")
    assert decode(reply.result, None) is None


def test_followers_end_with_a_parent_that_dies_at_once():
    parent_dies_after(lambda group: None)


@pytest.mark.slow
def test_followers_end_with_a_parent_that_dies_at_work():
    def wait_for_reply(group: RankGroup) -> None:
        with pytest.raises(CacheError, match="no cache"):
            group.call("describe")

    parent_dies_after(wait_for_reply)


def parent_dies_after(work: Callable[[RankGroup], None]) -> None:
    """Kill a process when it has started a group and done `work`; its followers have to go."""
    read_fd, write_fd = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            group = RankGroup(["cpu", "cpu", "cpu"])
            work(group)
            pids = [follower.process.pid for follower in group._followers]
            os.write(write_fd, msgspec.json.encode(pids))
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write_fd)
    try:
        pids = msgspec.json.decode(os.read(read_fd, 1000), type=list[int])
    finally:
        os.close(read_fd)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    assert len(pids) == 2
    wait_for(lambda: not any(map(is_running, pids)), "followers to end with their parent")


def test_a_killed_follower_ends_the_group(group, engine):
    """The last with the shared group: a process is in one at a time."""
    follower = group._followers[0].process.pid
    group.check()
    threading.Timer(0.2, os.kill, (follower, signal.SIGKILL)).start()
    started_s = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL"):
        while time.monotonic() < started_s + NOTICED_S:
            run(engine, PROMPTS, batch=2)
    assert time.monotonic() < started_s + NOTICED_S
    for use in (group.check, lambda: group.extend([1])):
        with pytest.raises(WorkerDied, match="rank 1 of 2"):
            use()
    group.close()
    assert not is_running(follower)


@pytest.mark.slow
def test_a_rank_that_leaves_the_others_in_a_collective_ends_the_group():
    """Rank 0 gives up after the first layer, whose sum the other waits for in the second."""

    def give_up(place: Place) -> None:
        raise TransferError(f"nobody takes layer {place.index}")

    group = RankGroup(["cpu", "cpu"])
    try:
        engine = RankedEngine(group, MODEL_DIR, KVCacheLayout.LBHNC, 64)
        step = SequenceStep([1, 2, 3], 0, engine.tables([1]))
        with pytest.raises(WorkerDied, match="where rank 0 failed: nobody takes layer 0"):
            engine.runner.prefill_chunk(step, give_up)
        with pytest.raises(WorkerDied, match="nobody takes layer 0"):
            engine.runner.prefill_chunk(step)
    finally:
        group.close()


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_refused_by_all_ranks():
    group = RankGroup(["cpu"] * 3)
    try:
        with pytest.raises(UsageError, match="num_attention_heads = 8") as raised:
            group.call("load", str(MODEL_DIR), "float32", 1)
        assert (raised.value.field, raised.value.value) == ("tensor_parallel_size", 3)
        with pytest.raises(UsageError, match="model"):
            group.call("load", str(MODEL_DIR / "none"), "float32", 1)
    finally:
        group.close()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + NOTICED_S
    while not done():
        assert time.monotonic() < deadline_s, f"waited {NOTICED_S:g} s for {what}"
        time.sleep(0.02)
