"""What transformers' layers take for their cache: KV goes to the blocks of a step, and comes back.

Each cache lives for one forward pass. `views[g][i]` is layer i of group g, [B, H, N, C] with any
strides, owned by the caller; C is K's head size, then V's. The facts relied on are attention's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import Cache

from kvxfer.model.groups import LayerKV, Place
from kvxfer.model.packing import DecodeGroup, DecodeStep, GroupStep, PackedStep

STEP_ARGUMENT: Final = "kvxfer_step"
"""The keyword argument in which the attention function finds the step."""

Views = Sequence[Sequence[torch.Tensor]]


class PagedCache(Cache):
    """The KV of one step: writes its rows, reads each sequence's blocks back.

    Nothing gathered outlives the layer that asked for it. `on_written` is told of each layer whose
    rows are in the blocks, or will be once the device has done what it was given.
    """

    def __init__(
        self, views: Views, step: PackedStep, on_written: Callable[[Place], None] | None = None
    ) -> None:
        super().__init__(layers=[])
        self._views = views
        self._step = step
        self._on_written = on_written

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, H, R, Dk] and [1, H, R, Dv] in; the same with the T gathered tokens for R out.

        T counts whole blocks; the group's spans say which of them are a sequence's own tokens.
        """
        place = self._step.places[layer_idx]
        view, part = self._views[place.group][place.index], self._step.groups[place.group]
        _hand_over(self._step, kwargs)
        write_rows(view, part, key_states, value_states)
        if self._on_written is not None:
            self._on_written(place)
        return split_kv(gather(view, part), key_states.shape[-1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused: positions are given with every call."""
        return 0


class DecodeCache(Cache):
    """The KV of decode steps, attended in place: writes each row's KV, and gathers nothing.

    What it runs reads its step's tensors on the device only, so it can be recorded and repeated.
    """

    def __init__(self, views: Views, step: DecodeStep) -> None:
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
        place = self._step.places[layer_idx]
        view, part = self._views[place.group][place.index], self._step.groups[place.group]
        _hand_over(self._step, kwargs)
        write_rows(view, part, key_states, value_states)
        self._step.pending[layer_idx] = key_states, value_states, view
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused: positions are given with every call."""
        return 0


class RecordingCache(Cache):
    """Stands in for a cache in a probe: notes what each layer would keep, and keeps nothing."""

    def __init__(self, step: PackedStep | None = None) -> None:
        """`step`: handed to attention, if that wants one."""
        super().__init__(layers=[])
        self._step = step
        self.layers_kv: dict[int, LayerKV] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._step is not None:
            _hand_over(self._step, kwargs)
        dtype = str(key_states.dtype).removeprefix("torch.")
        heads, head_dim_k = key_states.shape[1], key_states.shape[-1]
        self.layers_kv[layer_idx] = LayerKV(heads, head_dim_k, value_states.shape[-1], dtype)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def write_rows(
    view: torch.Tensor, part: GroupStep | DecodeGroup, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """[1, H, R, Dk] and [1, H, R, Dv] to the R rows' blocks and slots."""
    rows = torch.cat((keys[0], values[0]), dim=-1).transpose(0, 1)
    view.permute(0, 2, 1, 3)[part.write_blocks, part.write_slots] = rows


def gather(view: torch.Tensor, part: GroupStep) -> torch.Tensor:
    """[1, H, T, C]: the blocks that the group's spans read, strided alike for all layouts."""
    pages = view.index_select(0, part.read_blocks)
    return pages.permute(1, 0, 2, 3).reshape(1, view.shape[1], -1, view.shape[3])


def split_kv(content: torch.Tensor, head_dim_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return content[..., :head_dim_k], content[..., head_dim_k:]


def _hand_over(step: PackedStep | DecodeStep, update_kwargs: dict[str, Any]) -> None:
    attention_kwargs = update_kwargs.get("kwargs")
    if attention_kwargs is not None:
        attention_kwargs[STEP_ARGUMENT] = step
