"""What a model's layers keep of a token: seen in a forward pass of one, not guessed from the names
of its config's fields.

Facts relied on (transformers 5.17 and 5.24, run): each layer's KV has the shape in which it is
cached, a tensor-parallel shard's included; attention is given its layer's sliding window with every
call, None where it has none. DeepSeek's multi-head latent attention caches one latent vector of
`kv_lora_rank` and a rotary key (5.24; the versions before cached K and V by head).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvxfer.cache.spec import GroupKind
from kvxfer.errors import UnsupportedModel
from kvxfer.model.encoder_decoder import Decoder, probe_layers
from kvxfer.model.groups import LayerKV
from kvxfer.model.loader import ModelInfo
from kvxfer.model.packing import PackedStep, probe_step
from kvxfer.model.paged_cache import RecordingCache

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Run = Callable[[PackedStep, RecordingCache], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Runs:
    """The two ways of a forward pass: packed, and a decoder's behind an encoder."""

    packed: Run
    decoder: Decoder


def model_layers(
    info: ModelInfo, config: PretrainedConfig, runs: Runs, device: torch.device
) -> tuple[list[LayerKV], list[LayerKV]]:
    """By layer, of self-attention and of cross attention; errors as `decoder_layers`, and
    UnsupportedModel where torch cannot run it, as when slices of its layers do not fit together."""
    start = info.decoder_start_token_id
    try:
        if start is not None:
            return probe_layers(runs.decoder, start, device)
        return decoder_layers(runs.packed, config, device), []
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{info.architecture}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedModel(f"{info.architecture}: cannot be run: {reason}") from error


def decoder_layers(run: Run, config: PretrainedConfig, device: torch.device) -> list[LayerKV]:
    """By layer. Raises UnsupportedModel when a layer has no KV, or when attention does not run as
    this package needs it to."""
    num_layers = int(config.num_hidden_layers)
    step = probe_step(num_layers, device)
    cache = RecordingCache(step)
    run(step, cache)
    windows = step.windows or {}
    if sorted(cache.layers_kv) != list(range(num_layers)):
        raise UnsupportedModel(f"{len(cache.layers_kv)} of {num_layers} layers have KV")
    if sorted(windows) != list(range(num_layers)):
        raise UnsupportedModel("its layers do not run attention through transformers' seam")
    _check_windows(config, windows)
    has_latent = getattr(config, "kv_lora_rank", None) is not None
    return [_kind(cache.layers_kv[n], windows[n], has_latent) for n in range(num_layers)]


def _kind(layer: LayerKV, window: int, has_latent: bool) -> LayerKV:
    if window:
        return replace(layer, kind=GroupKind.SLIDING, window=window)
    if has_latent and layer.num_kv_heads == 1:
        return replace(layer, kind=GroupKind.MLA)
    return layer


def _check_windows(config: PretrainedConfig, windows: dict[int, int]) -> None:
    """A window that the config states must have reached attention."""
    kinds = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and not windows[layer]:
            raise UnsupportedModel(f"layer {layer} hides its sliding window")
    stated = getattr(config, "sliding_window", None)
    if stated and not kinds and not any(windows.values()):
        raise UnsupportedModel("it hides its sliding window")
