"""What a runner is asked that its model cannot do: refused before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ModelError, UsageError
from kvxfer.model.loader import ModelInfo
from kvxfer.model.packing import SequenceStep
from kvxfer.model.paged_cache import Views


def check_steps(steps: Sequence[SequenceStep], info: ModelInfo) -> None:
    """Raises ModelError for more tokens than the model takes or an encoder that it has not,
    UsageError for a token outside the vocabulary."""
    for step in steps:
        longest = max(step.end, step.num_encoder_tokens)
        if longest > info.max_model_len:
            raise ModelError(f"{longest} tokens, the model takes {info.max_model_len}")
        if step.num_encoder_tokens and not info.is_encoder_decoder:
            raise ModelError(f"{step.num_encoder_tokens} encoder tokens, the model has no encoder")
        for token in (min(step.tokens), max(step.tokens)):
            if not 0 <= token < info.vocab_size:
                raise UsageError("tokens", token, f"vocabulary is 0 to {info.vocab_size - 1}")


def check_views(specs: Sequence[KVCacheSpec], views: Views) -> None:
    """Raises ModelError when the views are not of the shapes and dtypes that `specs` say."""
    if len(views) != len(specs):
        raise ModelError(f"views of {len(views)} groups, the model has {len(specs)}")
    for group, (spec, layers) in enumerate(zip(specs, views, strict=True)):
        if len(layers) != spec.num_layers:
            raise ModelError(f"group {group}: {len(layers)} views for {spec.num_layers} layers")
        shape = [len(layers[0]), spec.num_kv_heads, spec.block_size, spec.content_dim]
        for layer, view in enumerate(layers):
            dtype = str(view.dtype).removeprefix("torch.")
            if list(view.shape) != shape or dtype != spec.dtype:
                raise ModelError(
                    f"group {group}: the view of layer {layer} is {dtype} {list(view.shape)}, "
                    f"not {spec.dtype} {shape}"
                )
