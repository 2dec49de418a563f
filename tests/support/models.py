"""Tiny random-weight models on disk, and a plain-memory cache to run them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.cache.footprint import (
    decoder_start,
    has_encoder,
    kv_tokens,
    prompt_chunks,
    prompt_entries,
)
from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cache.table import BlockTable
from kvxfer.model import SampleSpec
from kvxfer.model.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, save_tokenizer

if TYPE_CHECKING:
    import torch

    from kvxfer.cache.spec import KVCacheSpec
    from kvxfer.model.runner import ModelRunner, SequenceStep

FAMILIES = ("llama", "qwen3", "mistral")
ENCODER_DECODERS = ("t5", "bart")
MISTRAL_WINDOW = 12
GREEDY = SampleSpec()
GRANULARITY = 4096


def write_model(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and the byte-level tokenizer.json; returns `directory`.

    4 layers, hidden 64, 8 query and 2 KV heads, 512 positions; with an encoder 2 layers in each
    half and 4 heads. `overrides` are config fields. The same family and seed give the same
    weights. Imports transformers (seconds, once).
    """
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    }[family]
    common = _ENCODED_FIELDS if family in ENCODER_DECODERS else _FIELDS
    fields = {**common, **_FAMILY_FIELDS.get(family, {}), **overrides}
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
_ENCODED_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "decoder_start_token_id": PAD_ID,
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
    "gemma3": {
        "head_dim": 16,
        "sliding_window": MISTRAL_WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    },
    "t5": {
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "initializer_factor": 2.5,
        "feed_forward_proj": "gated-gelu",
    },
    "bart": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 512,
        "forced_eos_token_id": None,
        "init_std": 0.1,
        "scale_embedding": True,
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
) -> tuple[list[torch.Tensor], GroupGeometry]:
    """One view [B, H, N, C] a layer into one plain buffer, strided as the geometry says. What no
    block owns, and every block before it is written, is NaN: reading it shows."""
    import torch

    geometry = GroupGeometry.build(spec, layout, num_blocks, GRANULARITY)
    dtype = getattr(torch, spec.dtype)
    buffer = torch.full((geometry.total_bytes // spec.itemsize,), float("nan"), dtype=dtype)
    layer_stride, *strides = (stride // spec.itemsize for stride in geometry.strides)
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.content_dim)
    views = [buffer.as_strided(shape, strides, i * layer_stride) for i in range(spec.num_layers)]
    return views, geometry


@dataclass
class HostSequence:
    """A request under way: all its tokens so far, and where their KV lies, group by group."""

    tokens: list[int]
    tables: list[BlockTable]
    num_prompt: int

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class HostEngine:
    """A runner over its own plain-memory cache: the single process that others are compared to."""

    def __init__(
        self,
        runner: ModelRunner,
        layout: KVCacheLayout | Sequence[KVCacheLayout] = KVCacheLayout.LBHNC,
        num_blocks: int = 64,
        block_size: int = 16,
    ) -> None:
        """`layout`: of all groups, or one for each. Every group has `num_blocks` blocks."""
        self.runner = runner
        self.specs = runner.probe_specs(block_size)
        layouts = [layout] * len(self.specs) if isinstance(layout, KVCacheLayout) else layout
        self.views = [
            host_views(spec, one, num_blocks)[0]
            for spec, one in zip(self.specs, layouts, strict=True)
        ]

    def tables(self, blocks: Sequence[int], step_tokens: int = 32) -> list[BlockTable]:
        """A sequence's tables: the same block ids in every group, of which a group with a window
        takes no more than its ring needs for steps of `step_tokens`."""
        return [
            BlockTable(blocks[: spec.blocks_held(len(blocks) * spec.block_size, step_tokens)])
            for spec in self.specs
        ]

    def prefill(
        self,
        prompt: Sequence[int],
        blocks: Sequence[int],
        chunk: int = 32,
        sample: SampleSpec = GREEDY,
    ) -> HostSequence:
        """Prefill in chunks of `chunk` tokens; the first token of the answer is appended."""
        from kvxfer.model.runner import SequenceStep

        self.runner.bind(self.views)
        tables, token = self.tables(blocks, chunk), None
        for part in prompt_chunks(self.specs, len(prompt), chunk):
            wanted = sample if part.stop == len(prompt) else None
            step = SequenceStep(prompt[part.start : part.stop], part.start, tables, wanted)
            token = self.runner.prefill_chunk(step)
        assert token is not None
        return HostSequence([*prompt, token], tables, len(prompt))

    def decode(
        self,
        sequences: Sequence[HostSequence],
        num_tokens: int,
        sample: SampleSpec = GREEDY,
    ) -> None:
        """Append `num_tokens` tokens to each sequence, all in one batch."""
        self.runner.bind(self.views)
        for _ in range(num_tokens):
            steps = [self.next_step(sequence, sample) for sequence in sequences]
            for sequence, token in zip(sequences, self.runner.decode_step(steps), strict=True):
                sequence.tokens.append(token)

    def receive(
        self, other: HostEngine, sequence: HostSequence, blocks: Sequence[int]
    ) -> HostSequence:
        """The sequence that `other` prefilled, to be decoded here: what the hand-over of a prompt
        brings is copied to `blocks`, as a decode worker's tables have them."""
        tables = self.tables(blocks, step_tokens=1)
        for group, entries in enumerate(prompt_entries(self.specs, sequence.num_prompt)):
            here, there = tables[group].ids(entries), sequence.tables[group].ids(entries)
            for mine, theirs in zip(self.views[group], other.views[group], strict=True):
                mine[here] = theirs[there]
        return HostSequence(list(sequence.tokens), tables, sequence.num_prompt)

    def next_step(self, sequence: HostSequence, sample: SampleSpec = GREEDY) -> SequenceStep:
        """The decode step of the last token."""
        from kvxfer.model.runner import SequenceStep

        start = decoder_start(self.specs, sequence.num_prompt) + len(sequence.answer) - 1
        num_encoder = sequence.num_prompt if has_encoder(self.specs) else 0
        return SequenceStep(sequence.tokens[-1:], start, sequence.tables, sample, num_encoder)

    def kv(self, sequence: HostSequence) -> list[torch.Tensor]:
        """Copies [tokens still seen, H, C] a layer, group by group; the same for every layout."""
        found = []
        lengths = kv_tokens(self.specs, sequence.num_prompt, len(sequence.answer) - 1)
        for group, (spec, num_tokens) in enumerate(zip(self.specs, lengths, strict=True)):
            kept = spec.kept(num_tokens)
            first = spec.first_seen(num_tokens) - kept.start * spec.block_size
            last = num_tokens - kept.start * spec.block_size
            blocks = sequence.tables[group].ids(kept)
            for view in self.views[group]:
                tokens = view[blocks].transpose(1, 2).flatten(0, 1)
                found.append(tokens[first:last].clone())
        return found
