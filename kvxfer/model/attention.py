"""Attention over the paged cache, as transformers calls it.

Facts relied on, run on transformers 5.17 and 5.24 with a dozen model families:
- a layer calls `cache.update(k, v, layer)`, then the function registered with AttentionInterface
  with what update returned: in multi-head latent attention the layer expands it in between, so
  update must return the gathered KV, and block tables cannot be read in the attention function;
- the step reaches that function by two roads, of which some models have only one: extra keyword
  arguments of the model's forward, and (5.24) the dict that the layer hands to update and then
  splats into the attention call;
- for a name that is not registered with AttentionMaskInterface transformers builds no mask, so
  ours (causal, with a window) is the only one; an argument that changes the result in a way not
  known here (sinks, position biases) is refused, never dropped;
- every layer is given its own sliding window with each call: the probe puts it in a group by it,
  and a call with another one is refused;
- scaled_dot_product_attention on a GPU materialises the scores when it is given a mask and
  grouped heads at once, so heads are repeated there; on the CPU it does not;
- a layer that reads its KV as it is cached hands attention the very tensors that update returned
  (run with Llama, Qwen3, Mistral, Gemma 2 and 3; DeepSeek V3 does not, see above).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface

from kvxfer.errors import UnsupportedModel
from kvxfer.model.packing import DecodeStep, GroupStep, PackedStep, Span
from kvxfer.model.paged_cache import STEP_ARGUMENT

PAGED: Final = "kvxfer"
"""The name of `paged_attention` in transformers."""
UNMASKED: Final = "kvxfer_unmasked"
"""That of `unmasked_attention`."""
HARMLESS_ARGUMENTS: Final = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "is_causal",
    ]
)
"""Arguments that do not change what attention computes here."""


def register() -> None:
    """Make both attention functions implementations that models may be set to."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionInterface.register(UNMASKED, unmasked_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, R, Dk] queries over [1, H, T, Dk] keys to [1, R, heads, Dv]; zeros in dummy rows.

    One call of attention per sequence, so that no bit depends on the batch.
    """
    step: PackedStep | DecodeStep | None = kwargs.pop(STEP_ARGUMENT, None)
    _check_understood(module, attention_mask, dropout, kwargs)
    if step is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass on what its forward is given"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModel(f"{type(module).__name__} is not causal")
    layer = int(getattr(module, "layer_idx", -1))
    group = step.places[layer].group
    _check_window(module, step, layer, sliding_window or 0)
    if isinstance(step, DecodeStep):
        cached = step.pending.pop(layer)
        if cached[0] is not key or cached[1] is not value:
            raise UnsupportedModel(f"{type(module).__name__} changes KV after the cache held it")
        return _decoded(step, group, query, cached, scaling, softcap), None
    part = step.groups[group]
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for span in part.spans:
        rows = slice(span.row, span.row + span.num_rows)
        keys = slice(span.kv_start, span.kv_start + span.kv_len)
        one = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        output[:, rows] = _attended(part, span, one, scaling, softcap).transpose(1, 2)
    return output, None


def unmasked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As above where every query sees every key: in an encoder, and for a single decoder token.

    `position_bias` [1, heads, R, T] is added to the scores.
    """
    _check_understood(module, attention_mask, dropout, kwargs)
    if getattr(module, "is_causal", False) and query.shape[2] > 1:
        raise UnsupportedModel(f"{type(module).__name__} runs {query.shape[2]} tokens at once")
    result = _masked(query, key, value, position_bias, scaling)
    return result.transpose(1, 2), None


def _check_understood(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    unknown = sorted(
        name for name in kwargs.keys() - HARMLESS_ARGUMENTS if kwargs[name] is not None
    )
    if unknown:
        reason = f"calls attention with {', '.join(unknown)}"
    elif attention_mask is not None or dropout:
        reason = "calls attention with a mask or dropout of its own"
    else:
        return
    raise UnsupportedModel(f"{type(module).__name__} {reason}")


def _check_window(
    module: torch.nn.Module, step: PackedStep | DecodeStep, layer: int, window: int
) -> None:
    if isinstance(step, PackedStep) and step.windows is not None:
        step.windows[layer] = window
        return
    known = step.groups[step.places[layer].group].window
    if window != known:
        reason = f"has a window of {window} tokens in layer {layer}, which was {known}"
        raise UnsupportedModel(f"{type(module).__name__} {reason}")


def _attended(
    part: GroupStep,
    span: Span,
    one: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence's queries, keys and values to [1, heads, num_rows, Dv]."""
    mask = part.mask(span) if span.num_rows > 1 else None
    if softcap is not None:
        return _softcapped(*one, mask, scaling, softcap)
    if mask is None:
        # A span's keys begin with the first that its first row sees: this row sees them all.
        return _single_query(*one, scaling)
    return _masked(*one, mask, scaling)


def _decoded(
    step: DecodeStep,
    group: int,
    query: torch.Tensor,
    cached: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    # Triton is wanted here alone, and a machine without a GPU may not have it.
    from kvxfer.model.paged_decode import paged_decode

    key, _, view = cached
    head_dim_k = key.shape[-1]
    scale = head_dim_k**-0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1)
    part, lens = step.groups[group], step.seq_lens
    tables, window = part.block_tables, part.window or None
    return paged_decode(rows, view, head_dim_k, tables, lens, scale, window, softcap)[None]


def _single_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The query heads of one KV head become its query rows: no mask and no repeated heads."""
    grouped = query.reshape(1, key.shape[1], -1, query.shape[-1])
    result = functional.scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return result.reshape(1, query.shape[1], 1, value.shape[-1])


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """`mask`: bool, what is seen; or of query's dtype, what is added to the scores."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        groups = 1
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=groups > 1
    )


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """softmax(softcap · tanh(scores / softcap)) V, as Gemma 2 has it; softmax in fp32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value
