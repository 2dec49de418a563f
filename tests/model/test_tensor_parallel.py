"""A model cut into two ranks against the whole one, and what cannot be cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.children import run_in_child
from support.comparing import BLOCK_SIZE, block_lists
from support.models import HostEngine, write_model
from support.ranked import PROMPTS, SIZE, answers, answers_of_rank

from kvxfer.cache.spec import GroupKind
from kvxfer.errors import UnsupportedModel, UsageError, WorkerDied
from kvxfer.model import inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.model.tensor_parallel import TensorParallel, check_config, shard

FAMILIES = ("llama", "gemma2", "deepseek_v3", "llama of one KV head")
FOLLOWER_TIMEOUT_S = 60.0
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent.parent)}


@dataclass
class Compared:
    """One model, run whole and as two ranks."""

    whole: HostEngine
    whole_said: list[list[int]]
    whole_logits: torch.Tensor
    part: HostEngine
    part_said: list[list[int]]
    part_logits: torch.Tensor
    other_said: list[list[int]]


def write_biased(directory: Path, kv_heads: int) -> Path:
    """A Llama whose linear layers all have a bias that is not zero."""
    fields = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": kv_heads}
    write_model(directory, "llama", **fields)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in weights.items():
        if name.endswith("proj.bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    """By family; rank 1 of all of them is one process."""
    directories = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        if family.startswith("llama"):
            directories[family] = write_biased(directory, 2 if family == "llama" else 1)
        else:
            directories[family] = write_model(directory, family)
    command = [sys.executable, "-m", "support.ranked", *map(str, directories.values())]
    found = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
    ) as other:
        try:
            halves = {
                family: answers_of_rank(0, directory, directory / "rendezvous")
                for family, directory in directories.items()
            }
            output, _ = other.communicate(timeout=FOLLOWER_TIMEOUT_S)
        finally:
            other.kill()
    others = [json.loads(line) for line in output.splitlines()]
    for (family, directory), said in zip(directories.items(), others, strict=True):
        runner = ModelRunner.load(inspect_model(directory), "cpu", "float32", 1)
        whole = HostEngine(runner, block_size=BLOCK_SIZE)
        found[family] = Compared(whole, *answers(whole), *halves[family], said)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_the_whole_model_on_both_ranks(compared, family):
    one = compared[family]
    assert one.part_said == one.other_said == one.whole_said
    torch.testing.assert_close(one.part_logits, one.whole_logits, rtol=1e-4, atol=1e-4)
    assert len({token for answer in one.whole_said for token in answer}) > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_keeps_its_own_heads(compared, family):
    one = compared[family]
    blocks = block_lists(PROMPTS)[1]
    for spec, mine, whole, part in zip(
        one.part.specs, one.whole.specs, one.whole.views, one.part.views, strict=True
    ):
        is_latent, heads = mine.kind is GroupKind.MLA, mine.num_kv_heads
        assert spec.num_kv_heads == (1 if is_latent else max(1, heads // SIZE))
        assert spec.replicas == (1 if is_latent else max(1, SIZE // heads))
        for layer, there in zip(part, whole, strict=True):
            here = layer[blocks[0], :, :BLOCK_SIZE]
            expected = there[blocks[0], : spec.num_kv_heads, :BLOCK_SIZE]
            torch.testing.assert_close(here, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "size", "reason"),
    [
        ({}, 3, "num_attention_heads = 8"),
        (
            {"num_attention_heads": 6, "hidden_size": 48},
            3,
            "nor is a multiple of num_key_value_heads = 2",
        ),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}, 4, "= 6"),
    ],
)
def test_sizes_that_do_not_divide_the_heads_are_refused(fields, size, reason):
    given = {"num_attention_heads": 8, "num_key_value_heads": 2, **fields}
    with pytest.raises(UsageError, match=reason) as raised:
        check_config(transformers.LlamaConfig(**given), size)
    assert (raised.value.field, raised.value.value) == ("tensor_parallel_size", size)


def test_ranks_may_be_a_multiple_of_the_kv_heads():
    for size in (1, 2, 4, 8):
        check_config(transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2), size)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_neighbouring_ranks_hold_the_same_kv_head(kv_heads):
    whole = small_llama(num_key_value_heads=kv_heads).state_dict()
    name = "model.layers.0.self_attn.{}_proj.weight"
    for rank in range(4):
        model = small_llama(num_key_value_heads=kv_heads)
        model.load_state_dict(whole)
        shard(model, Place(rank, 4))
        cut = model.state_dict()
        for letter, head in (("q", rank), ("k", rank * kv_heads // 4), ("v", rank * kv_heads // 4)):
            expected = whole[name.format(letter)][8 * head : 8 * (head + 1)]
            assert torch.equal(cut[name.format(letter)], expected)


def test_models_without_a_plan_are_refused():
    with pytest.raises(UsageError, match="no tensor-parallel plan for t5"):
        check_config(transformers.T5Config(), 2)


@dataclass
class Place:
    """As much of Ranks as cutting asks for."""

    rank: int
    size: int


def test_layers_that_do_not_divide_are_refused():
    model = small_llama(intermediate_size=63)
    with pytest.raises(UsageError, match=r"63 features of model\.layers\.0\.mlp"):
        shard(model, Place(0, 2))


def test_a_style_that_is_not_understood_is_refused():
    model = small_llama()
    model._tp_plan = {**model.tp_plan, "model.norm": "sequence_parallel"}
    with pytest.raises(UnsupportedModel, match=r"sequence_parallel of model\.norm"):
        shard(model, Place(0, 2))


def small_llama(**fields):
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 32,
            **fields,
        }
    )
    return transformers.LlamaForCausalLM(config)


def test_a_rank_alone_gives_up_at_the_deadline(tmp_path):
    place = TensorParallel(0, 2, tmp_path / "rendezvous", timeout_s=1.0)

    def give_up() -> None:
        with pytest.raises(WorkerDied, match="rank 0 of 2: meeting the others failed"):
            place.join("cpu")

    assert run_in_child(give_up) == 0  # after that a process meets nobody any more


@pytest.mark.parametrize(
    ("rank", "size", "field"), [(0, 0, "tensor_parallel_size"), (2, 2, "rank")]
)
def test_places_that_are_none_are_refused(tmp_path, rank, size, field):
    with pytest.raises(UsageError) as raised:
        TensorParallel(rank, size, tmp_path / "rendezvous")
    assert raised.value.field == field
