"""One model over several processes: each rank holds a slice of the linear layers, by transformers'
own plan, and the partial sums are added up over all ranks.

Facts relied on (transformers 5.24 and torch 2.13, read and run on the CPU):
- `model.tp_plan` names modules and parameters, layer numbers as `*`, and a style for each.
  'colwise' cuts a linear layer's outputs and 'rowwise' its inputs, always in pairs around what
  works head by head; every other style that is left whole here gives, whole, what its consumers
  get from all ranks together. Where that does not hold shapes do not fit, and the probe fails.
- transformers' own `tp_plan="auto"` needs accelerate, and makes DTensors; plain slices need
  neither.
- It refuses KV heads that the size does not divide. Here a size that is a multiple of them runs
  too: neighbouring ranks hold the same head, whose projections are called k_proj and v_proj in all
  plans that cut them (read in the plans of all its models that have one).
- The plan cuts no attention of DeepSeek-V3: its latent KV is whole on every rank.
- gloo finds the end of a peer at once, by its connection; NCCL does not: there the deadline of a
  collective ends the process. gloo asks the host's name for an address, which can take a minute to
  fail, unless an interface is named: ranks share a host, so it is `lo`. Its loop keeps a thread and
  four descriptors for as long as the process, however many groups come and go.
- `init_method` wants a URL, of which it takes a space or % for what it is not: hence a FileStore.
- torch counts the groups that a process tried to join. The count, which names the next one, goes
  back to 0 only when one that was joined is left: after a failed meeting a process meets nobody.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from kvxfer.cache.spec import GroupKind
from kvxfer.errors import UnsupportedModel, UsageError, WorkerDied
from kvxfer.model.groups import ModelGroups

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

COLLECTIVE_TIMEOUT_S: Final = 120.0
"""More than the ranks' loading times differ by; a peer's end is noticed long before."""
SHARDED: Final = frozenset({"colwise", "rowwise"})
WHOLE: Final = frozenset(
    {
        "colwise_gather_output",
        "colwise_rep",
        "embedding_colwise",
        "embedding_rowwise",
        "mla_kv_a_proj",
        "replicate",
        "replicated_with_grad_allreduce",
        "rowwise_rep",
        "rowwise_split_input",
    }
)
"""Styles whose modules take and give the same on every rank."""
KV_PROJECTIONS: Final = frozenset({"k_proj", "v_proj"})
"""Whose outputs are KV heads."""
EXPERTS: Final = "moe_tp_experts"
"""A mixture's experts stay whole, with all that the plan says of their parameters."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Which part of a model a process runs, and where it meets the others."""

    rank: int
    size: int
    rendezvous: Path
    """Absolute path of a file that is not there yet, in a directory that only this user enters."""
    timeout_s: float = COLLECTIVE_TIMEOUT_S
    """For the others to come, and for each collective."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError("tensor_parallel_size", self.size, "must be at least 1")
        if not 0 <= self.rank < self.size:
            raise UsageError("rank", self.rank, f"must be 0 to {self.size - 1}")

    def join(self, device: str) -> Ranks:
        """Meet the other ranks, which call this too. Raises WorkerDied when one does not come
        within the deadline; then this process can join no group any more."""
        return Ranks(self, torch.device(device))


class Ranks:
    """The process group, which this owns; one a process. Every method but `close` is a collective:
    all ranks call it, in the same order, with tensors of the same shape.

    Raises WorkerDied when a rank is gone or late: then nothing can be computed together any more.
    """

    def __init__(self, place: TensorParallel, device: torch.device) -> None:
        self.rank, self.size = place.rank, place.size
        self.num_totals = 0
        """Sums so far; on a GPU those given to the device."""
        self._is_open = False
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        limit = timedelta(seconds=place.timeout_s)
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        try:
            store = distributed.FileStore(str(place.rendezvous), self.size)  # type: ignore[attr-defined]
            store.set_timeout(limit)
            distributed.init_process_group(
                "nccl" if is_cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
                device_id=device if is_cuda else None,
            )
        except (RuntimeError, ValueError) as error:
            raise self._lost("meeting the others", error) from error
        self._is_open = True

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same bits on each; `partial` may be overwritten.

        On the CPU ranks are added up in order, so that an element's bits depend neither on where in
        the tensor it is nor on the tensor's size; an all-reduce in a ring has no such order.
        """
        try:
            if partial.is_cuda:
                distributed.all_reduce(partial)
                self.num_totals += 1
                return partial
            parts = [torch.empty_like(partial) for _ in range(self.size)]
            distributed.all_gather(parts, partial.contiguous())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost("a sum over the ranks", error) from error
        self.num_totals += 1
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def largest(self, value: int, device: torch.device) -> int:
        """The largest that any rank gives."""
        shared = torch.tensor([value], device=device)
        try:
            distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        except RuntimeError as error:
            raise self._lost("agreeing on a number", error) from error
        return int(shared.item())

    def close(self) -> None:
        """Leave the group; the others need not. Idempotent."""
        if self._is_open:
            self._is_open = False
            distributed.destroy_process_group()

    def _lost(self, doing: str, error: Exception) -> WorkerDied:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return WorkerDied(f"rank {self.rank} of {self.size}: {doing} failed: {reason}")


@contextmanager
def left_on_failure(ranks: Ranks | None) -> Iterator[None]:
    """Close `ranks`, if there are any, when the body raises."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def check_config(config: PretrainedConfig, size: int) -> None:
    """Raises UsageError (tensor_parallel_size) for a model that cannot be cut into `size`: known
    before its weights are read."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not SHARDED & set(plan.values()):
        reason = f"transformers has no tensor-parallel plan for {config.model_type} models"
        raise UsageError("tensor_parallel_size", size, reason)
    if not any(style == "colwise" and "attn" in name for name, style in plan.items()):
        return
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        reason = f"does not divide num_attention_heads = {heads}"
        raise UsageError("tensor_parallel_size", size, reason)
    heads = getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and max(heads, size) % min(heads, size):
        reason = f"neither divides nor is a multiple of num_key_value_heads = {heads}"
        raise UsageError("tensor_parallel_size", size, reason)


def shard(model: PreTrainedModel, ranks: Ranks) -> None:
    """Cut a loaded model's linear layers down to this rank's slices, in place.

    Raises UsageError (tensor_parallel_size) for a layer that the size does not divide,
    UnsupportedModel for a plan that is not understood; then the model is of no use any more.
    """
    # Any: transformers types neither the plan nor what an instance makes of it.
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    experts = tuple(f"{name}." for name, style in plan.items() if style == EXPERTS)
    rules = {
        name: style
        for name, style in plan.items()
        if style not in WHOLE | {EXPERTS} and not name.startswith(experts)
    }
    for name, style in sorted(rules.items()):
        if style not in SHARDED:
            kind = type(model).__name__
            raise UnsupportedModel(f"{kind}: tensor-parallel style {style} of {name} is not run")
    kv_heads = _num_kv_heads(model.config)
    for name, module in model.named_modules():
        found = rules.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if found is None:
            continue
        if not isinstance(module, torch.nn.Linear):
            reason = f"the plan cuts {name}, a {type(module).__name__}: only linear layers are cut"
            raise UnsupportedModel(f"{type(model).__name__}: {reason}")
        if found == "rowwise":
            _cut_inputs(name, module, ranks)
        else:
            is_kv = name.rpartition(".")[2] in KV_PROJECTIONS
            shares = min(ranks.size, kv_heads) if is_kv else ranks.size
            _cut_outputs(name, module, ranks, shares)


def shared_heads(groups: ModelGroups, config: PretrainedConfig, size: int) -> ModelGroups:
    """What a rank of `size` was seen to hold, with how many ranks hold the same heads.
    Each has its share of the KV heads, or one that others have too, or a latent that all have: who
    moves KV between ranks relies on it. Raises UnsupportedModel."""
    heads = _num_kv_heads(config)
    found = []
    for spec in groups.specs:
        replicas = 1 if spec.kind is GroupKind.MLA else max(1, size // heads)
        if spec.kind is not GroupKind.MLA and spec.num_kv_heads * size != heads * replicas:
            seen = f"a rank of {size} sees {spec.num_kv_heads} KV heads"
            raise UnsupportedModel(f"{seen} of a model that has {heads}")
        found.append(replace(spec, replicas=replicas))
    return replace(groups, specs=tuple(found))


def _num_kv_heads(config: PretrainedConfig) -> int:
    heads: Any = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads)


def _cut_outputs(name: str, linear: torch.nn.Linear, ranks: Ranks, shares: int) -> None:
    mine = _share(name, linear.out_features, ranks, shares)
    linear.weight = _own(linear.weight[mine])
    if linear.bias is not None:
        linear.bias = _own(linear.bias[mine])
    linear.out_features = len(linear.weight)


def _cut_inputs(name: str, linear: torch.nn.Linear, ranks: Ranks) -> None:
    mine = _share(name, linear.in_features, ranks, ranks.size)
    linear.weight = _own(linear.weight[:, mine])
    if ranks.rank:
        linear.register_parameter("bias", None)  # added once
    linear.in_features = linear.weight.shape[1]
    linear.register_forward_hook(lambda module, inputs, partial: ranks.total(partial))


def _share(name: str, num_features: int, ranks: Ranks, shares: int) -> slice:
    """This rank's of `shares` equal parts; where those are fewer than ranks, neighbours have the
    same one."""
    each, rest = divmod(num_features, shares)
    if rest:
        reason = f"does not divide the {num_features} features of {name}"
        raise UsageError("tensor_parallel_size", ranks.size, reason)
    index = ranks.rank * shares // ranks.size
    return slice(index * each, (index + 1) * each)


def _own(slice_of: torch.Tensor) -> torch.nn.Parameter:
    """A copy, so that what is cut off is freed."""
    return torch.nn.Parameter(slice_of.detach().clone(), requires_grad=False)
