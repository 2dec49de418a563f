"""`kvxfer demo`: prefill and decode in two processes give what one process gives, bit by bit,
while decode's cache grows in the middle of a transfer.

Pushed by processes that are started as a user starts them; pulled, by default, by processes that
are forked from one that has imported what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import TINY_MODEL, demo
from support.models import write_model

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

PAIRS = [
    ("bundled", "LBHNC", "BLHNC", "push"),
    pytest.param("bundled", "LBHNC", "BLHNC", "pull", marks=pytest.mark.slow),
    pytest.param("qwen3", "LHBNC", "LBNHC", "pull", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "BLNHC", "BHLNC", "pull", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundled model, and random weights in the shapes of other families."""
    larger = {
        "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512,
        "max_position_embeddings": 1536,
    }  # fmt: skip
    shapes = {"qwen3": larger, "deepseek_v3": larger, "gemma2": {}, "t5": {}}

    def written(family: str) -> Path:
        if family == "bundled":
            return TINY_MODEL
        return write_model(tmp_path_factory.mktemp(family), family, **shapes[family])

    return written


@pytest.mark.parametrize(("family", "prefill", "decode", "lane"), PAIRS)
def test_equals_a_single_process_while_the_cache_grows(
    family: str,
    prefill: str,
    decode: str,
    lane: str,
    models: Callable[[str], Path],
) -> None:
    done, result = demo(
        "--model", str(models(family)), "--lane", lane, "--max-new-tokens", "24",
        "--layout-prefill", prefill, "--layout-decode", decode,
    )  # fmt: skip
    assert done.code == 0, done
    assert result["ok"]
    assert result["tokens_equal"]
    assert result["kv_equal"]
    assert result["grew"]
    assert result["grew_in_flight"]
    assert result["lane"].endswith(f"/{lane}")
    growth = result["growth"]
    assert growth["start_ns"] < growth["generation_ns"] < growth["end_ns"]
    before, after = result["before"]["decode"], result["after"]["decode"]
    assert before["layout"] == decode
    assert after["base_address"] == before["base_address"]
    assert after["committed_bytes"] > before["committed_bytes"]
    for account in (before, after, result["after"]["prefill"]):
        assert account["registered_bytes"] == account["committed_bytes"]
        assert account["committed_bytes"] <= account["reserved_bytes"]
        assert account["blocks_used"] == account["blocks_quarantined"] == 0
        assert account["blocks_free"] + 1 == account["blocks_total"]
    for request in result["requests"]:
        assert request["bytes"] == request["prompt_tokens"] * bytes_per_token(result)
        assert 1 <= request["output_tokens"] <= 24  # random weights may stop early


@pytest.mark.slow  # tests/e2e/test_kinds.py has all kinds in one process
@pytest.mark.parametrize(
    ("family", "lane", "why_not"),
    [("gemma2", "push", ""), ("t5", "pull", "encoder")],
)
def test_other_kinds_of_layers_equal_a_single_process_too(
    family: str, lane: str, why_not: str, models: Callable[[str], Path]
) -> None:
    """Windows, and cross attention. Where decode cannot be made to grow while
    KV streams, that is said."""
    done, result = demo("--model", str(models(family)), "--lane", lane, "--max-new-tokens", "24")
    assert done.code == 0, done
    assert result["ok"]
    assert result["tokens_equal"]
    assert result["kv_equal"]
    assert result["grew_in_flight"] == (not why_not)
    assert why_not in result["why_no_growth"]
    for account in result["after"].values():
        assert account["blocks_used"] == account["blocks_quarantined"] == 0


def bytes_per_token(result: dict[str, list[dict[str, int]]]) -> float:
    first = result["requests"][0]
    return first["bytes"] / first["prompt_tokens"]


@pytest.mark.slow
def test_own_prompts_and_everything_committed_from_the_start(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ROMEO. But soft, what light through yonder window breaks?\n\nHAMLET. ü ☂\n")
    done, result = demo(
        "--kv-commit", "all", "--prompt", "To be, or not to be", "--prompt-file", str(prompts),
        "--max-new-tokens", "8", "--keep-logs", str(tmp_path / "logs"),
    )  # fmt: skip
    assert done.code == 0, done
    assert result["ok"]
    assert not result["grew"]
    assert len(result["requests"]) == 3
    kinds = ("log", "trace.jsonl")
    expected = {f"{role}.{kind}" for role in ("prefill", "decode", "single") for kind in kinds}
    assert {path.name for path in (tmp_path / "logs").iterdir()} == expected
