"""`kvxfer bench tokens` and `kvxfer bench beside`: what they measure with, and that a wrong byte or
token fails them.

The two engines of `beside` run as threads of this process here, over the loopback connector; runs
with real processes take long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bench import token_end
from kvxfer.bench import token_model as token_model_module
from kvxfer.bench.beside import BesideOptions, _setup
from kvxfer.bench.token_end import EngineEnd, serve
from kvxfer.bench.token_figures import beside_figures, figures_of
from kvxfer.bench.token_flow import Flow, Piece, pieces_of
from kvxfer.bench.token_model import LLAMA_SHAPE, random_prompts, token_model
from kvxfer.bench.token_pair import PACED, Beside, EnginePair, engine_pair
from kvxfer.bench.token_phase import Phase, Sample, differing, gaps_within
from kvxfer.bench.token_rounds import Equality, Found, Round
from kvxfer.bench.token_timeline import FIRST, STEPS, moments_of, parts_of
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cli import app
from kvxfer.command import run_app
from kvxfer.errors import KvxferError, TransferError, UsageError
from kvxfer.transfer.plan import TransferPlan
from kvxfer.worker.transfer_thread import Movement

RECORD = {
    "metric", "value", "unit", "bar", "better", "ok", "runs", "spread_iqr", "machine", "versions",
    "commit", "command",
}  # fmt: skip
SMALL = {"context_tokens": 32, "cycle_tokens": 16, "max_num_batched_tokens": 32, "sequences": 2}


def kept(path: Path) -> dict[str, Any]:
    """Figures by metric, each complete."""
    figures = json.loads(path.read_text())
    assert all(set(figure) == RECORD and figure["machine"] for figure in figures)
    return {figure["metric"]: figure for figure in figures}


# --- the time to a token, in parts ----------------------------------------------------------------


def event(name: str, at_ns: int, **fields: Any) -> dict[str, Any]:
    return {"event": name, "request": "mine", "at_ns": at_ns, **fields}


PULLED = [
    event("accepted", 1_000_000),
    event("accepted", 5, request="another"),
    event("requested", 3_000_000),
    event("transfer_start", 4_000_000),
    event("computed", 50_000_000),
    event("taken", 53_000_000),
    event("transfer_end", 54_500_000, end_ns=52_000_000),
    event("filled", 55_000_000),
]


def test_parts_are_what_lies_between_the_events_and_add_up() -> None:
    moments = moments_of("mine", 0, [51_000_000, 70_000_000], PULLED)
    assert list(moments) == ["sent", *(name for name, _ in STEPS), "first"]
    parts = parts_of(moments)
    assert parts.pop(FIRST) == pytest.approx(1)
    assert list(parts.values()) == pytest.approx([1, 2, 47, 2, 1, 2, 15])
    assert sum(parts.values()) == pytest.approx(70)


def test_what_was_pushed_before_prefill_ended_adds_nothing_after_it() -> None:
    pushed = [one for one in PULLED if one["event"] != "taken"]
    pushed[-2] = event("transfer_end", 54_500_000, end_ns=49_000_000)
    parts = parts_of(moments_of("mine", 0, [51_000_000, 70_000_000], pushed))
    assert parts[dict(STEPS)["last_read"]] == 0
    assert sum(parts.values()) - parts[FIRST] == pytest.approx(70)


# --- answers compared -----------------------------------------------------------------------------


def test_an_answer_counts_up_to_its_first_other_token() -> None:
    equality = Equality()
    equality.compare([1, 2, 3], [1, 2, 3])
    equality.compare([1, 9, 9], [1, 2, 3])
    assert (equality.positions, equality.flips) == (5, 1)
    with pytest.raises(KvxferError, match="2 tokens came"):
        equality.compare([1, 2], [1, 2, 3])


def test_other_kv_and_other_tokens_miss_their_bars() -> None:
    parts = {words: 1.0 for _, words in STEPS}
    found = Found([Round((10.0, 12.0), (11.5, 14.5), parts)] * 3, Equality(positions=100))
    figures = {one.metric: one for one in figures_of(found, 64)}
    added = [figures[f"added time to the {name} token of a 64-token prompt"]
             for name in ("first", "second")]  # fmt: skip
    assert [(one.value, one.ok) for one in added] == [(1.5, True), (2.5, False)]
    assert figures["prompts whose KV differs"].ok
    found.equality.prompts_with_other_kv, found.equality.flips = 1, 3
    wrong = [one.metric for one in figures_of(found, 64) if not one.ok]
    assert len(wrong) == 3
    assert "prompts whose KV differs" in wrong


# --- what moves in the background -----------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 40),
    sets=st.integers(1, 5),
    tokens=st.integers(1, 64),
    least=st.integers(1, 1 << 16),
)
def test_pieces_are_every_layer_of_every_set_once(layers, sets, tokens, least) -> None:
    spec = KVCacheSpec(layers, 2, 8, 8, "float32", 16)
    pieces = pieces_of(spec, sets, tokens, least)
    found = [(piece.set_index, layer) for piece in pieces for layer in piece.layers]
    assert found == [(index, layer) for index in range(sets) for layer in range(layers)]
    layer_bytes = spec.block_bytes // spec.block_size // layers * tokens
    whole = [piece for piece in pieces if piece.layers.stop < layers or len(pieces) == sets]
    enough = min(least, layers * layer_bytes)
    assert all(len(piece.layers) * layer_bytes >= enough for piece in whole)


class Link:
    """Moves when told to; `size` bytes a piece."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ended: list[Any] = []

    def plan(self, piece: Piece) -> TransferPlan:
        import numpy as np

        start = np.zeros(1, dtype=np.int64)
        return TransferPlan.of_runs(start, start, start + self.size)

    def move(self, plan: TransferPlan, ended: Any) -> None:
        self.ended.append(ended)

    def land(self, at_s: float, error: str | None = None) -> None:
        self.ended.pop(0)(Movement(self.size, 1, 0, int(at_s * 1e9), error))


PIECES = [Piece(index, range(4)) for index in range(4)]


def test_a_pace_is_kept_and_counted() -> None:
    link = Link(100_000_000)
    flow = Flow(PIECES, link.plan, link.move, 1.0, 3)  # 0.1 s each at 1 GB/s
    for step in range(1, 41):  # 4 s
        flow.pump(step / 10)
        while link.ended:
            link.land(step / 10)
    assert flow.gbps((1.05, 3.05)) == pytest.approx(1.0)
    assert flow.wait_s(4.0) == pytest.approx(0.1)


def test_a_flow_that_lags_behind_has_no_more_under_way_than_told() -> None:
    link = Link(100_000_000)
    flow = Flow(PIECES, link.plan, link.move, None, 8)
    flow.pump(1.0)
    assert len(link.ended) == 3  # of 4 pieces: none is written twice at once
    assert not flow.drain()
    for _ in range(4):
        link.land(1.0)
        flow.drain()
    assert flow.drain()
    assert len(flow.landed) == 4


def test_a_transfer_that_fails_ends_the_bench() -> None:
    link = Link(8)
    flow = Flow(PIECES, link.plan, link.move, None, 1)
    flow.pump(0.0)
    with pytest.raises(TransferError, match="broken"):
        link.land(1.0, "broken")


# --- samples --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), max_size=30).map(sorted), st.floats(0, 50), st.floats(1, 50))
def test_gaps_lie_within_the_window(ends: list[float], begin: float, length: float) -> None:
    window = begin, begin + length
    inside = [end for end in ends if window[0] <= end <= window[1]]
    gaps = gaps_within(ends, window)
    assert len(gaps) == max(0, len(inside) - 1)
    assert sum(gaps) == pytest.approx(1e3 * (inside[-1] - inside[0]) if inside else 0, abs=1e-6)


def test_a_phase_counts_between_its_settling() -> None:
    phase = Phase(10.0, 0.5, 2.0, None)
    assert phase.window == (10.5, 12.5)
    assert phase.end_s == 13.0


def test_steps_are_compared_as_far_as_both_went() -> None:
    assert differing([(1, 2), (3, 4)], [(1, 2)]) == 0
    assert differing([(1, 2), (3, 4)], [(1, 2), (3, 5), (6, 7)]) == 1
    found = Beside()
    for steps in ([(1,)], [(1,), (2,)], [(1,), (3,)]):
        found.compare("target", steps)
    assert found.wrong_steps == 1


def test_ratios_are_of_neighbours() -> None:
    found = Beside()
    for quiet_ms, loaded_ms in ((10.0, 11.0), (20.0, 21.0)):
        quiet, loaded = (
            {"source": Sample((2 * ms,) * 3, (), 0.0), "target": Sample((ms,) * 3, (), gbps)}
            for ms, gbps in ((quiet_ms, 0.0), (loaded_ms, 9.9))
        )
        found.quiet.append(quiet)
        for ratios in (*found.ratios.values(), found.noise):
            ratios.add(quiet, loaded)
    figures = {one.metric: one for one in beside_figures(found, 10.0)}
    p99 = figures["inter-token p99 beside KV at 10 GB/s"]
    assert p99.value == pytest.approx((1.1 + 1.05) / 2)
    assert (p99.bar, p99.ok, p99.runs) == (1.03, False, 2)
    assert figures["prefill's time beside KV, saturated"].ok
    assert figures["KV at 10 GB/s: rate reached"].ok
    assert not {one.metric: one for one in beside_figures(found, 11.0)}[
        "KV at 11 GB/s: rate reached"
    ].ok
    assert found.ratios[PACED].gbps == [9.9, 9.9]


def test_prompts_do_not_end_by_themselves() -> None:
    with token_model(None, "cpu", 1) as model:
        prompts = random_prompts(model.info, 3, 500, 1)
        ends = set(model.info.eos_token_ids)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert ends
    assert not any(ends & set(prompt) for prompt in prompts)


def test_a_random_model_is_kept_and_used_again(tmp_path: Path, monkeypatch, capsys) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    monkeypatch.setattr(token_model_module, "LLAMA_SHAPE", {**LLAMA_SHAPE, **small})
    for words in ("written in", "using the random model"):
        with token_model(None, "cuda:0", 32, tmp_path / "kept") as model:
            assert model.info.vocab_size == 100
        assert words in capsys.readouterr().out
    with (
        pytest.raises(UsageError, match="another shape"),
        token_model(None, "cuda:0", 48, tmp_path / "kept"),
    ):
        pass  # fmt: skip


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["tokens", "--requests", "0"], "requests"),
        (["tokens", "--warm-up", "-1"], "warm_up"),
        (["tokens", "--devices", "cpu"], "devices"),
        (["beside", "--gbps", "0"], "gbps"),
        (["beside", "--sets", "1"], "sets"),
        (["beside", "--devices", "cpu,cpu", "--context-tokens", "99999"], "prompt_tokens"),
    ],
)
def test_bad_options_are_named(words: list[str], field: str, capsys) -> None:
    assert run_app(app, ["bench", *words]) == UsageError.exit_code
    assert field in capsys.readouterr().err.replace("-", "_")


# --- engines --------------------------------------------------------------------------------------


class ThreadEnd(threading.Thread):
    """An end in a thread, with what is asked of a process."""

    exitcode: int | None = None
    pid: int | None = None

    def kill(self) -> None:
        raise AssertionError("an end did not stop by itself")


def start_thread(
    ours: Connection, theirs: Connection, role: str, device: str, env: Mapping[str, str]
) -> ThreadEnd:
    def run() -> None:
        with theirs:
            serve(theirs, role, device)

    thread = ThreadEnd(target=run)
    thread.start()
    return thread


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines in threads. transformers loads one model at a time."""
    loading = threading.Lock()

    def load(*told: Any) -> EngineEnd:
        with loading:
            return EngineEnd(*told)

    monkeypatch.setattr(token_end, "EngineEnd", load)
    monkeypatch.setattr(EnginePair, "start", staticmethod(start_thread))
    yield


@pytest.mark.slow
def test_beside_measures_and_keeps_its_figures(threads, tmp_path: Path) -> None:
    path = tmp_path / "beside.json"
    words = ["--devices", "cpu,cpu", "--connector", "loopback", "--rounds", "1", "--kv-mib", "16"]
    words += ["--seconds", "1", "--settle-s", "0.05", "--gbps", "0.001", "--json", str(path)]
    for name, value in SMALL.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    code = run_app(app, ["bench", "beside", *words])
    figures = kept(path)
    assert code == (0 if all(one["ok"] for one in figures.values()) else 1)
    assert figures["inter-token p99 beside KV at 0.001 GB/s"]["bar"] == 1.03
    assert figures["prefill's time beside KV, saturated"]["bar"] == 1.1
    assert figures["KV, saturated: rate reached"]["value"] > 0
    for name in ("sets of blocks that arrived wrong", "steps with other tokens than quiet"):
        assert figures[name]["value"] == 0
    machine = figures["inter-token p99, quiet"]["machine"]
    assert "lane loopback/" in machine


def test_a_set_that_did_not_arrive_is_counted(threads) -> None:
    options = BesideOptions(connector="loopback", kv_mib=16, **SMALL)
    with (
        token_model(None, "cpu", 1) as model,
        engine_pair(("cpu", "cpu"), _setup(options, model, "cpu")) as (pair, _),
    ):
        assert pair.ask("source", "wrong_sets") == 0
        assert pair.ask("target", "wrong_sets") == options.sets


def test_a_cache_that_is_too_small_is_refused(threads) -> None:
    options = BesideOptions(connector="loopback", kv_mib=1, **{**SMALL, "sequences": 8})
    with (
        token_model(None, "cpu", 1) as model,
        pytest.raises(TransferError, match="kv_mib"),
        engine_pair(("cpu", "cpu"), _setup(options, model, "cpu")),
    ):
        pass


@pytest.mark.slow
def test_beside_in_processes(tmp_path: Path) -> None:
    path = tmp_path / "beside.json"
    words = ["--devices", "cpu,cpu", "--connector", "nixl", "--rounds", "1", "--kv-mib", "16"]
    words += ["--seconds", "1.5", "--settle-s", "0.1", "--gbps", "0.001", "--json", str(path)]
    for name, value in SMALL.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert run_app(app, ["bench", "beside", *words]) in (0, 1)
    figures = kept(path)
    assert figures["sets of blocks that arrived wrong"]["ok"]
    assert figures["steps with other tokens than quiet"]["ok"]


@pytest.mark.slow
def test_tokens_of_real_workers(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    words = ["--devices", "cpu,cpu", "--connector", "nixl", "--prompt-tokens", "64"]
    words += ["--max-num-batched-tokens", "32", "--kv-stream-bytes", "32768", "--requests", "2"]
    words += ["--warm-up", "1", "--verified", "1", "--verified-tokens", "8", "--kv-mib", "16"]
    assert run_app(app, ["bench", "tokens", *words, "--json", str(path)]) in (0, 1)
    figures = kept(path)
    assert figures["added time to the first token of a 64-token prompt"]["bar"] == 2.0
    assert figures["added time to the second token of a 64-token prompt"]["runs"] == 2
    assert figures["prompts whose KV differs"]["ok"]
    parts = [one["value"] for name, one in figures.items() if name.startswith("part: ")]
    whole = figures["time to the second token: handed over"]["value"]
    assert sum(parts) == pytest.approx(whole, rel=0.05)  # medians of two are means
