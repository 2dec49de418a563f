"""Tiny random-weight models on disk, and a plain-memory cache to run them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.model import SampleSpec
from kvxfer.model.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, save_tokenizer

if TYPE_CHECKING:
    import torch

    from kvxfer.cache.spec import KVCacheSpec
    from kvxfer.model.runner import ModelRunner

FAMILIES = ("llama", "qwen3", "mistral")
MISTRAL_WINDOW = 12
GREEDY = SampleSpec()
GRANULARITY = 4096


def write_model(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and the byte-level tokenizer.json; returns `directory`.

    4 layers, hidden 64, 8 query and 2 KV heads, 512 positions; `overrides` are config fields.
    The same family and seed give the same weights. Imports transformers (seconds, once).
    """
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    }[family]
    fields = {**_FIELDS, **_FAMILY_FIELDS.get(family, {}), **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**fields)).eval()
    directory.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "initializer_range": 0.2,  # large enough for answers that do not repeat one token
}
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": MISTRAL_WINDOW},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": MISTRAL_WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


def host_views(
    spec: KVCacheSpec, layout: KVCacheLayout, num_blocks: int
) -> tuple[list[torch.Tensor], CacheGeometry]:
    """One view [B, H, N, C] a layer into one plain buffer, strided as the geometry says. What no
    block owns, and every block before it is written, is NaN: reading it shows."""
    import torch

    geometry = CacheGeometry.build(spec, layout, num_blocks, GRANULARITY)
    dtype = getattr(torch, spec.dtype)
    buffer = torch.full((geometry.total_bytes // spec.itemsize,), float("nan"), dtype=dtype)
    layer_stride, *strides = (stride // spec.itemsize for stride in geometry.strides)
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.content_dim)
    views = [buffer.as_strided(shape, strides, i * layer_stride) for i in range(spec.num_layers)]
    return views, geometry


@dataclass
class HostSequence:
    """A request under way: all its tokens so far, and where their KV lies."""

    tokens: list[int]
    block_table: Sequence[int]
    num_prompt: int

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class HostEngine:
    """A runner over its own plain-memory cache: the single process that others are compared to."""

    def __init__(
        self,
        runner: ModelRunner,
        layout: KVCacheLayout = KVCacheLayout.LBHNC,
        num_blocks: int = 64,
        block_size: int = 16,
    ) -> None:
        self.runner = runner
        self.spec = runner.probe_spec(block_size)
        self.views, self.geometry = host_views(self.spec, layout, num_blocks)

    def prefill(
        self,
        prompt: Sequence[int],
        block_table: Sequence[int],
        chunk: int = 32,
        sample: SampleSpec = GREEDY,
    ) -> HostSequence:
        """Prefill in chunks of `chunk` tokens; the first token of the answer is appended."""
        from kvxfer.model.runner import SequenceStep

        self.runner.bind(self.views)
        token = None
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            last = start + len(part) == len(prompt)
            step = SequenceStep(part, start, block_table, sample if last else None)
            token = self.runner.prefill_chunk(step)
        assert token is not None
        return HostSequence([*prompt, token], block_table, len(prompt))

    def decode(
        self,
        sequences: Sequence[HostSequence],
        num_tokens: int,
        sample: SampleSpec = GREEDY,
    ) -> None:
        """Append `num_tokens` tokens to each sequence, all in one batch."""
        from kvxfer.model.runner import SequenceStep

        self.runner.bind(self.views)
        for _ in range(num_tokens):
            steps = [
                SequenceStep(s.tokens[-1:], len(s.tokens) - 1, s.block_table, sample)
                for s in sequences
            ]
            for sequence, token in zip(sequences, self.runner.decode_step(steps), strict=True):
                sequence.tokens.append(token)

    def kv(self, sequence: HostSequence) -> list[torch.Tensor]:
        """Copies [tokens with KV, H, C] a layer, whatever the layout and the block ids."""
        num_tokens = len(sequence.tokens) - 1
        return [
            view[list(sequence.block_table)].transpose(1, 2).flatten(0, 1)[:num_tokens].clone()
            for view in self.views
        ]
