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
- scaled_dot_product_attention on a GPU materialises the scores when it is given a mask and
  grouped heads at once, so heads are repeated there; on the CPU it does not;
- a layer that reads its KV as it is cached hands attention the very tensors that update returned
  (run with Llama, Qwen3, Mistral, Gemma 2 and 3; DeepSeek V3 does not, see above).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface, Cache

from kvxfer.errors import UnsupportedModel
from kvxfer.model.packing import DecodeStep, PackedStep, Span

STEP_ARGUMENT: Final = "kvxfer_step"
"""The keyword argument in which the attention function finds the PackedStep."""
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


class PagedCache(Cache):
    """The KV of one step: writes its rows into `views`, reads each sequence's blocks back.

    `views[l]` is [B, H, N, C] with any strides, owned by the caller; C is K's head size, then V's.
    Nothing gathered outlives the layer that asked for it.
    """

    def __init__(self, views: Sequence[torch.Tensor], step: PackedStep) -> None:
        super().__init__(layers=[])
        self._views = views
        self._step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, H, R, Dk] and [1, H, R, Dv] in; the same with the T gathered tokens for R out.

        T counts whole blocks; the spans say which of them are a sequence's own tokens.
        """
        step, view = self._step, self._views[layer_idx]
        _hand_over(step, kwargs)
        _write(view, step, key_states, value_states)
        pages = view.index_select(0, step.read_blocks)
        gathered = pages.permute(1, 0, 2, 3).reshape(1, view.shape[1], -1, view.shape[3])
        head_dim_k = key_states.shape[-1]
        return gathered[..., :head_dim_k], gathered[..., head_dim_k:]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused: positions are given with every call."""
        return 0


class DecodeCache(Cache):
    """The KV of decode steps, attended in place: writes each row's KV, and gathers nothing.

    `views` as PagedCache's. What it runs reads its step's tensors on the device only, so it can be
    recorded and repeated.
    """

    def __init__(self, views: Sequence[torch.Tensor], step: DecodeStep) -> None:
        super().__init__(layers=[])
        self._views = views
        self._step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, H, R, Dk] and [1, H, R, Dv] in, and the same tensors out."""
        view = self._views[layer_idx]
        _hand_over(self._step, kwargs)
        _write(view, self._step, key_states, value_states)
        self._step.pending[layer_idx] = key_states, value_states, view
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused: positions are given with every call."""
        return 0


class RecordingCache(Cache):
    """Stands in for PagedCache in a probe: notes each layer's geometry and keeps no KV."""

    def __init__(self, step: PackedStep) -> None:
        super().__init__(layers=[])
        self._step = step
        self.geometries: dict[int, tuple[int, int, int, str]] = {}
        """By layer: KV heads, head size of K and of V, dtype by torch's name."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _hand_over(self._step, kwargs)
        dtype = str(key_states.dtype).removeprefix("torch.")
        heads, head_dim_k = key_states.shape[1], key_states.shape[-1]
        self.geometries[layer_idx] = (heads, head_dim_k, value_states.shape[-1], dtype)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _write(
    view: torch.Tensor, step: PackedStep | DecodeStep, keys: torch.Tensor, values: torch.Tensor
) -> None:
    rows = torch.cat((keys[0], values[0]), dim=-1).transpose(0, 1)
    view.permute(0, 2, 1, 3)[step.write_blocks, step.write_slots] = rows


def _hand_over(step: PackedStep | DecodeStep, update_kwargs: dict[str, Any]) -> None:
    attention_kwargs = update_kwargs.get("kwargs")
    if attention_kwargs is not None:
        attention_kwargs[STEP_ARGUMENT] = step


def register(name: str) -> None:
    """Make `name` an attention implementation that models may be set to."""
    AttentionInterface.register(name, paged_attention)


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
    step = kwargs.pop(STEP_ARGUMENT, None)
    _check_understood(module, step, attention_mask, dropout, kwargs)
    layer = int(getattr(module, "layer_idx", -1))
    step.windows[layer] = sliding_window
    if isinstance(step, DecodeStep):
        cached = step.pending.pop(layer)
        if cached[0] is not key or cached[1] is not value:
            raise UnsupportedModel(f"{type(module).__name__} changes KV after the cache held it")
        return _decoded(step, query, cached, scaling, sliding_window, softcap), None
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for span in step.spans:
        rows = slice(span.row, span.row + span.num_rows)
        start, end = span.kv_start, span.kv_start + span.kv_len
        if span.num_rows == 1 and sliding_window is not None:
            start = max(start, end - sliding_window)
        mask = None if span.num_rows == 1 else _mask(step, span, sliding_window)
        one = query[:, :, rows], key[:, :, start:end], value[:, :, start:end]
        if softcap is not None:
            result = _softcapped(*one, mask, scaling, softcap)
        elif mask is None:
            result = _single_query(*one, scaling)
        else:
            result = _banded(*one, mask, scaling)
        output[:, rows] = result.transpose(1, 2)
    return output, None


def _check_understood(
    module: torch.nn.Module,
    step: PackedStep | DecodeStep | None,
    attention_mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    unknown = sorted(
        name for name in kwargs.keys() - HARMLESS_ARGUMENTS if kwargs[name] is not None
    )
    if step is None:
        reason = "does not pass on what its forward is given"
    elif unknown:
        reason = f"calls attention with {', '.join(unknown)}"
    elif attention_mask is not None or dropout:
        reason = "calls attention with a mask or dropout of its own"
    elif not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        reason = "is not causal"
    else:
        return
    raise UnsupportedModel(f"{type(module).__name__} {reason}")


def _decoded(
    step: DecodeStep,
    query: torch.Tensor,
    cached: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    # Triton is wanted here alone, and a machine without a GPU may not have it.
    from kvxfer.model.paged_decode import paged_decode

    key, _, view = cached
    head_dim_k = key.shape[-1]
    scale = head_dim_k**-0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1)
    tables, lens = step.block_tables, step.seq_lens
    return paged_decode(rows, view, head_dim_k, tables, lens, scale, window, softcap)[None]


def _mask(step: PackedStep, span: Span, window: int | None) -> torch.Tensor:
    return step.mask(span, window if window is not None and window < span.kv_len else None)


def _single_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The query heads of one KV head become its query rows: no mask and no repeated heads."""
    grouped = query.reshape(1, key.shape[1], -1, query.shape[-1])
    result = functional.scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return result.reshape(1, query.shape[1], 1, value.shape[-1])


def _banded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
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
