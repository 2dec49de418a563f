"""Which group of the cache each layer of a model belongs to, found from what its layers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.cache.spec import GroupKind, KVCacheSpec


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    """By torch's name."""
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    """Of a SLIDING layer, in tokens; 0 for all others."""


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's views: `views[group][index]`."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """A model's groups, in the order of their first layers, and where each layer is."""

    specs: tuple[KVCacheSpec, ...]
    layers: tuple[Place, ...]
    """Of self-attention, by the layer's number in the model."""
    cross_layers: tuple[Place, ...] = ()
    """Of cross attention, by the decoder layer's number; empty without an encoder."""

    @classmethod
    def of(
        cls, layers: Sequence[LayerKV], cross_layers: Sequence[LayerKV], block_size: int
    ) -> ModelGroups:
        """Layers that keep the same share a group; self-attention counts before cross."""
        members: dict[LayerKV, int] = {}
        places: list[Place] = []
        for layer in (*layers, *cross_layers):
            index = members.get(layer, 0)
            members[layer] = index + 1
            places.append(Place(list(members).index(layer), index))
        specs = tuple(
            KVCacheSpec(
                num_layers=num_layers,
                num_kv_heads=layer.num_kv_heads,
                head_dim_k=layer.head_dim_k,
                head_dim_v=layer.head_dim_v,
                dtype=layer.dtype,
                block_size=block_size,
                kind=layer.kind,
                window=layer.window,
            )
            for layer, num_layers in members.items()
        )
        return cls(specs, tuple(places[: len(layers)]), tuple(places[len(layers) :]))
