"""Forward passes of encoder-decoder models over the paged cache, one sequence at a time.

    prompt       encoder over all of it ──▶ cross K/V of every decoder layer ──▶ CROSS groups
                 decoder over its start token, position 0 ──▶ FULL groups, logits
    each token   decoder over one token; its cross K/V is read from the cache

Facts relied on (transformers 5.24, run with T5, MT5, BART and Pegasus):
- a decoder layer asks the self-attention cache by `update` and takes positions (BART) and position
  biases (T5) from its `get_seq_length`, one for the whole batch: so one sequence a pass;
- cross attention calls `update` while `EncoderDecoderCache.is_updated[layer]` is False, and else
  reads `layers[layer].keys` and `.values`; the encoder's hidden states are then asked for their
  shape alone, and an encoder whose outputs are given is not run;
- T5's bias has the shape of the scores: what is gathered must end with the last token, not with
  the last block.

The decoder sees one token a pass and the encoder's tokens all see each other, so nothing here needs
a mask. A pass has as many rows wherever it runs: its bits depend on the prompt and position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from kvxfer.cache.spec import GroupKind
from kvxfer.errors import ModelError
from kvxfer.model.groups import LayerKV, ModelGroups, Place
from kvxfer.model.packing import GroupStep, SequenceStep, Stretch, index_group, stretches_of
from kvxfer.model.paged_cache import RecordingCache, Views, gather, split_kv, write_rows

Decoder = Callable[..., torch.Tensor]
"""Called with a cache and the arguments of a model's forward by name, gives logits [V]."""
FIRST_TOKEN: Final = 1
"""Position of the first generated token in the decoder, behind its start."""


class GroupsCache(Cache):
    """One kind of attention's KV of one sequence: `num_before` tokens of it precede the pass."""

    def __init__(
        self, views: Views, parts: Sequence[GroupStep], places: Sequence[Place], num_before: int
    ) -> None:
        super().__init__(layers=[])
        self._views, self._parts, self._places = views, parts, places
        self._num_before = num_before

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, H, R, Dk] and [1, H, R, Dv] in; those of all tokens so far, these included, out."""
        place = self._places[layer_idx]
        view, part = self._views[place.group][place.index], self._parts[place.group]
        write_rows(view, part, key_states, value_states)
        return split_kv(self.content(layer_idx), key_states.shape[-1])

    def content(self, layer: int) -> torch.Tensor:
        """[1, H, tokens, C]"""
        place = self._places[layer]
        part = self._parts[place.group]
        (span,) = part.spans
        gathered = gather(self._views[place.group][place.index], part)
        return gathered[:, :, span.kv_start : span.kv_start + span.kv_len]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_before


class CrossLayer:
    """What a layer reads that computed its cross attention's KV in an earlier pass."""

    def __init__(self, cache: GroupsCache, layer: int, head_dim_k: int) -> None:
        self._cache, self._layer, self._head_dim_k = cache, layer, head_dim_k

    @property
    def keys(self) -> torch.Tensor:
        return self._cache.content(self._layer)[..., : self._head_dim_k]

    @property
    def values(self) -> torch.Tensor:
        return self._cache.content(self._layer)[..., self._head_dim_k :]


def probe_layers(
    run: Decoder, start_token: int, device: torch.device
) -> tuple[list[LayerKV], list[LayerKV]]:
    """What each decoder layer keeps for self-attention and for cross attention. Raises ModelError
    when they are not found for layers 0 to n - 1 alike."""
    of_self, of_cross = RecordingCache(), RecordingCache()
    one = torch.tensor([[start_token]], device=device)
    run(EncoderDecoderCache(of_self, of_cross), input_ids=one, decoder_input_ids=one)
    numbers = list(range(len(of_self.layers_kv)))
    if not numbers or not numbers == sorted(of_self.layers_kv) == sorted(of_cross.layers_kv):
        raise ModelError(
            f"KV of {len(of_self.layers_kv)} layers, cross KV of {len(of_cross.layers_kv)}"
        )
    cross = [replace(of_cross.layers_kv[layer], kind=GroupKind.CROSS) for layer in numbers]
    return [of_self.layers_kv[layer] for layer in numbers], cross


def run_steps(
    run: Decoder,
    views: Views,
    groups: ModelGroups,
    steps: Sequence[SequenceStep],
    start_token: int,
) -> torch.Tensor:
    """A pass for each step, its KV written: logits [len(steps), V] of what follows each. A step
    without num_encoder_tokens is a prompt. Raises ModelError for one that is neither that nor a
    single token, or whose tables are too short; then no pass was run."""
    device = views[0][0].device
    passes = [_prepare(groups, step, start_token, device) for step in steps]
    return torch.stack([_run_pass(run, views, groups, one) for one in passes])


@dataclass(frozen=True, slots=True, eq=False)
class DecoderPass:
    prompt: Sequence[int] | None
    """What the encoder runs over; None where its KV is in the cache."""
    num_encoder: int
    token: int
    position: int
    """Of the token, in the decoder."""
    parts: Sequence[GroupStep]


def _prepare(
    groups: ModelGroups, step: SequenceStep, start_token: int, device: torch.device
) -> DecoderPass:
    _check(step)
    prompt = None if step.num_encoder_tokens else step.tokens
    num_encoder = step.num_encoder_tokens if prompt is None else len(prompt)
    token, position = (step.tokens[0], step.start) if prompt is None else (start_token, 0)
    parts = []
    for group, spec in enumerate(groups.specs):
        (whole,) = stretches_of([step], group, len(groups.specs))
        if spec.kind is GroupKind.CROSS:
            one = Stretch(whole.table, 0, num_encoder)
        else:
            one = Stretch(whole.table, position, position + 1)
        parts.append(index_group(spec, [one], device, one.end - one.start))
    return DecoderPass(prompt, num_encoder, token, position, parts)


def _run_pass(run: Decoder, views: Views, groups: ModelGroups, one: DecoderPass) -> torch.Tensor:
    device = views[0][0].device
    num_before = one.num_encoder if one.prompt is None else 0
    own = GroupsCache(views, one.parts, groups.layers, one.position)
    cross = GroupsCache(views, one.parts, groups.cross_layers, num_before)
    # Any: of transformers' layer classes only the two properties are asked for.
    layers: Any = [
        CrossLayer(cross, layer, groups.specs[place.group].head_dim_k)
        for layer, place in enumerate(groups.cross_layers)
    ]
    cross.layers = layers
    given: dict[str, Any] = {"decoder_input_ids": torch.tensor([[one.token]], device=device)}
    if one.prompt is None:
        # Of the encoder only the number of tokens is asked: whatever else used this would fail.
        nothing = torch.zeros(1, 1, 1, dtype=views[0][0].dtype, device=device)
        hidden = nothing.expand(1, one.num_encoder, 1)
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=hidden)
    else:
        given["input_ids"] = torch.tensor([list(one.prompt)], device=device)
    return run(EncoderDecoderCache(own, cross), **given)


def _check(step: SequenceStep) -> None:
    if step.num_encoder_tokens < 0:
        raise ModelError(f"a step with {step.num_encoder_tokens} encoder tokens")
    if not step.num_encoder_tokens and step.start:
        raise ModelError(
            f"an encoder takes its prompt whole: none begins at {step.start}, and a decode step "
            "says how many tokens the encoder had"
        )
    if step.num_encoder_tokens and (len(step.tokens) != 1 or step.start < FIRST_TOKEN):
        raise ModelError(
            f"a decode step of {len(step.tokens)} tokens from position {step.start}, not of one "
            f"from {FIRST_TOKEN} or later"
        )
