"""config.json as far as it decides what is run, and what is not.

Facts relied on (transformers 5.17 and 5.24, read and run):
- RoPE of type 'dynamic' and 'longrope' picks its frequencies by the longest position of the whole
  packed batch, so one request would change another's tokens: such models are refused;
- masks that are not causal or causal with a window (chunked attention) never reach an attention
  function of ours, and recurrent state lives in no KV block: refused too;
- of the encoder-decoder models those named here were run (5.24), and agree with transformers' own
  generate(). T5 takes any length: where its config has no n_positions, 512 is what it was trained
  with. generate() takes a decoder's start from generation_config.json, then config.json, then the
  id of the beginning of a text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvxfer.errors import UnsupportedModel

ATTENTION_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
BATCH_WIDE_ROPE: Final = frozenset({"dynamic", "longrope"})
RELATIVE_TYPES: Final = frozenset({"t5", "mt5"})
"""Encoder-decoder models whose positions are relative, so that no length is their last."""
ENCODER_DECODER_TYPES: Final = RELATIVE_TYPES | {"bart", "pegasus"}
T5_LENGTH: Final = 512
STATEFUL_TYPES: Final = frozenset(
    [
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ]
)
"""Models that keep recurrent or convolution state, which no KV block holds."""


class Config(msgspec.Struct):
    """The fields of config.json that decide; transformers reads the rest."""

    model_type: str
    vocab_size: int
    architectures: list[str] = []
    max_position_embeddings: int | None = None
    n_positions: int | None = None
    is_encoder_decoder: bool | None = False
    decoder_start_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None
    attention_chunk_size: int | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence, None where the config does not say."""
        stated = self.max_position_embeddings or self.n_positions
        return T5_LENGTH if stated is None and self.model_type in RELATIVE_TYPES else stated


class Generation(msgspec.Struct):
    """generation_config.json, likewise."""

    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None


def check_supported(config: Config) -> None:
    """Raises UnsupportedModel, with the reason, for a model that is not run by design."""
    name = config.architectures[0] if config.architectures else "(none named)"
    rope_types = _rope_types(config.rope_parameters) | _rope_types(config.rope_scaling)
    batch_wide = sorted(rope_types & BATCH_WIDE_ROPE)
    other_layers = sorted(set(config.layer_types or ()) - ATTENTION_LAYERS)
    head = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
    if config.is_encoder_decoder and config.model_type not in ENCODER_DECODER_TYPES:
        known = ", ".join(sorted(ENCODER_DECODER_TYPES))
        reason = f"encoder-decoder models of type {config.model_type} are not run, only {known}"
    elif config.model_type in STATEFUL_TYPES:
        reason = f"{config.model_type} keeps state outside KV blocks"
    elif other_layers:
        reason = f"layer type {other_layers[0]} has no KV blocks of the usual kind"
    elif config.attention_chunk_size is not None:
        reason = "chunked attention is not run"
    elif batch_wide:
        reason = f"RoPE of type {batch_wide[0]} would let one request change another's tokens"
    elif not name.endswith(head):
        kind = "encoder-decoder" if config.is_encoder_decoder else "decoder-only"
        reason = f"of {kind} models only those named ...{head} are run"
    else:
        return
    raise UnsupportedModel(f"architecture {name}: {reason}")


def decoder_start(config: Config, generation: Generation) -> int | None:
    """The token that a decoder behind an encoder begins with; None without an encoder. Raises
    UnsupportedModel when there must be one and none is named, or one for each sequence."""
    if not config.is_encoder_decoder:
        return None
    named = (
        *(generation.decoder_start_token_id, config.decoder_start_token_id),
        *(generation.bos_token_id, config.bos_token_id),
    )
    start = next((token for token in named if token is not None), None)
    if not isinstance(start, int) or not 0 <= start < config.vocab_size:
        name = config.architectures[0]
        raise UnsupportedModel(f"architecture {name}: decoder_start_token_id is {start!r}")
    return start


def _rope_types(rope: dict[str, Any] | None) -> set[str]:
    """The types named in RoPE parameters, which may be nested by layer type."""
    found: set[str] = set()
    for key, value in (rope or {}).items():
        if isinstance(value, dict):
            found |= _rope_types(value)
        elif key in ("rope_type", "type") and isinstance(value, str):
            found.add(value)
    return found
