"""Runs a model over the paged cache: prefill chunks and decode batches, to tokens.

A runner is used by one thread. Its forward passes are bit-reproducible on one machine: fixed
threads, at least 4 rows (see packing), one attention call per sequence. Prefill in the same chunks
and decode in any batch give the same bits of KV and the same tokens, whatever the cache's layout
and block ids and wherever the KV was computed.

On a GPU, warm-up records the decode step (see decode_graph) and decode_step repeats it; prefill,
and everything on the CPU, runs op by op. The bits of a GPU depend on the batch.

Supported: transformers 5.17 to 5.39. Some version up to 5.24 renamed the forward's argument
`past_key_values` to `cache`, and 5.40 drops the old name; `_cache_argument` is the only shim.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import ModelError, UnsupportedModel, UsageError
from kvxfer.model.attention import STEP_ARGUMENT, DecodeCache, PagedCache, RecordingCache
from kvxfer.model.decode_graph import CudaRecorder, DecodeGraphs, Recorder
from kvxfer.model.loader import ModelInfo, load_model
from kvxfer.model.packing import MIN_ROWS, NULL_BLOCK, DecodeStep, PackedStep, SequenceStep, pack
from kvxfer.model.row_classes import padded_rows
from kvxfer.model.sampling import SampleSpec, sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelRunner", "SequenceStep"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """load, probe_spec, bind, warm_up; then prefill_chunk and decode_step; close."""

    def __init__(self, info: ModelInfo, model: PreTrainedModel, device: torch.device) -> None:
        self.info = info
        self._model: PreTrainedModel | None = model
        self._device = device
        self._cache_argument = _cache_argument(model)
        self._views: tuple[torch.Tensor, ...] = ()
        self._graphs: DecodeGraphs | None = None
        is_exact = device.type == "cpu" and model.dtype == torch.float32
        self._min_rows = padded_rows(model) if is_exact else MIN_ROWS

    @classmethod
    def load(cls, info: ModelInfo, device: str, dtype: str | None, threads: int) -> ModelRunner:
        """Load the weights onto `device` and set torch's threads for the whole process.

        `dtype` and errors as in `load_model`.
        """
        if threads < 1:
            raise UsageError("threads", threads, "must be at least 1")
        torch.set_num_threads(threads)
        return cls(info, load_model(info, device, dtype), torch.device(device))

    def probe_spec(self, block_size: int) -> KVCacheSpec:
        """The KV of this model's layers, seen in a forward pass of one token, not guessed from
        the config's field names. Raises UnsupportedModel when the layers differ, when a layer has
        no KV, or when attention does not run as this package needs it to."""
        step = SequenceStep(tokens=(0,), start=0, block_table=(NULL_BLOCK,))
        packed = pack([step], block_size, self._device)
        cache = RecordingCache(packed)
        self._run(packed, cache)
        num_layers = int(self._loaded().config.num_hidden_layers)
        if sorted(cache.geometries) != list(range(num_layers)):
            raise self._unsupported(f"{len(cache.geometries)} of {num_layers} layers have KV")
        if sorted(packed.windows) != list(range(num_layers)):
            raise self._unsupported("its layers do not run attention through transformers' seam")
        self._check_windows(packed.windows)
        shapes = set(cache.geometries.values())
        if len(shapes) != 1:
            raise self._unsupported(f"its layers differ in KV: {sorted(shapes)}")
        heads, head_dim_k, head_dim_v, dtype = shapes.pop()
        return KVCacheSpec(num_layers, heads, head_dim_k, head_dim_v, dtype, block_size)

    def bind(self, views: Sequence[torch.Tensor]) -> None:
        """Use `views` from now on: one tensor [B, H, N, C] a layer, of the probed spec's shape and
        dtype, any strides. The caller owns the memory and keeps it mapped; of uncommitted blocks
        only addresses are computed. Recorded decode steps are dropped unless the views are the
        very same tensors."""
        if not views:
            raise ModelError("no views to bind")
        first = views[0]
        for layer, view in enumerate(views):
            if view.ndim != 4 or view.shape != first.shape or view.dtype != first.dtype:
                raise ModelError(f"the view of layer {layer} is {view.dtype} {tuple(view.shape)}")
        if len(views) != len(self._views) or any(
            new is not old for new, old in zip(views, self._views, strict=True)
        ):
            self._graphs = None
        self._views = tuple(views)

    def warm_up(
        self,
        max_tokens: int,
        max_batch: int,
        max_context: int | None = None,
        capture_graphs: bool = True,
    ) -> None:
        """Run the largest prefill chunk and the largest decode batch, at the end of a context of
        `max_context` tokens (default: the model's longest), so that the memory they take was taken
        once. Every block id is 0: only the null block is touched, and zeroed first. On a GPU decode
        steps of up to `max_batch` are recorded before, unless `capture_graphs` is False."""
        context = min(max_context or self.info.max_model_len, self.info.max_model_len)
        table = [NULL_BLOCK] * -(-context // self._block_size)
        for view in self._views:
            view[NULL_BLOCK].zero_()
        if capture_graphs and self._device.type == "cuda":
            self.record_decode(max_batch)
        num_tokens = min(max_tokens, context)
        spec = SampleSpec()
        self.prefill_chunk(SequenceStep([0] * num_tokens, context - num_tokens, table, spec))
        self.decode_step([SequenceStep([0], context - 1, table, spec)] * max_batch)

    def record_decode(self, max_batch: int, record: Recorder | None = None) -> bool:
        """Record the decode step of up to `max_batch` sequences; decode_step repeats it from then
        on. Only the null block is touched. `record` defaults to CUDA graphs.

        False, with the reason logged, when it cannot be recorded: decode runs op by op as before.
        """
        self._graphs = None
        try:
            self._graphs = DecodeGraphs(
                self._run,
                self._views,
                max_batch,
                self.info.max_model_len,
                record or CudaRecorder(self._device),
            )
        except ModelError as error:
            logger.warning("decode steps are not recorded as graphs: %s", error)
        return self._graphs is not None

    def logits(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """One forward pass op by op, its KV written: [len(steps), V] for each sequence's last
        token, on the device. What the methods below choose from; errors as theirs."""
        for step in steps:
            self._check(step)
        packed = pack(steps, self._block_size, self._device, self._min_rows)
        logits = self._run(packed, PagedCache(self._views, packed))
        self._finish()
        return logits[: len(steps)]

    def decode_logits(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """As `logits`, for one new token a sequence; recorded work is repeated where there is any.
        Valid until the next step."""
        graphs = self._graphs
        if graphs is None or not graphs.holds(steps):
            return self.logits(steps)
        for step in steps:
            self._check(step)
        logits = graphs.run(steps)
        self._finish()
        return logits

    def prefill_chunk(self, step: SequenceStep) -> int | None:
        """Write the KV of the chunk's tokens; the token that follows them if `step.sample` is set.

        On return the KV is in memory. Raises UsageError for a token outside the vocabulary,
        ModelError for a step that the model or its block table cannot hold; nothing was written.
        """
        logits = self.logits([step])
        return self._choose([step], logits)[0] if step.sample is not None else None

    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        """One forward pass for several sequences; the token that follows each. As prefill_chunk."""
        return self._choose(steps, self.decode_logits(steps)) if steps else []

    def close(self) -> None:
        """Drop the weights, the views and what was recorded. Idempotent."""
        self._graphs = None
        self._model = None
        self._views = ()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _block_size(self) -> int:
        if not self._views:
            raise ModelError("no cache was bound")
        return self._views[0].shape[2]

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @torch.inference_mode()
    def _run(
        self,
        packed: PackedStep | DecodeStep,
        cache: PagedCache | DecodeCache | RecordingCache,
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {self._cache_argument: cache, STEP_ARGUMENT: packed}
        output = self._loaded()(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=True,
            logits_to_keep=packed.last_rows,
            **arguments,
        )
        logits: torch.Tensor = output.logits[0]
        if len(logits) != len(packed.last_rows):
            raise self._unsupported("it does not choose the rows of its logits")
        return logits

    def _choose(self, steps: Sequence[SequenceStep], logits: torch.Tensor) -> list[int]:
        specs = [step.sample or SampleSpec() for step in steps]
        # Greedy rows stay on the device; max gives the first, hence lowest, id of equal logits.
        best = logits.max(dim=-1)
        finite = torch.isfinite(best.values).tolist()
        tokens: list[int] = best.indices.tolist()
        for row, (step, spec) in enumerate(zip(steps, specs, strict=True)):
            if not finite[row]:
                raise ModelError(f"the logits for position {step.end} are not finite")
            if spec.temperature > 0:
                tokens[row] = sample(logits[row], step.end, spec)
        return tokens

    def _check(self, step: SequenceStep) -> None:
        if step.end > self.info.max_model_len:
            raise ModelError(f"{step.end} tokens, the model takes {self.info.max_model_len}")
        for token in (min(step.tokens), max(step.tokens)):
            if not 0 <= token < self.info.vocab_size:
                raise UsageError("tokens", token, f"vocabulary is 0 to {self.info.vocab_size - 1}")

    def _check_windows(self, windows: dict[int, int | None]) -> None:
        """A window that the config states must have reached attention."""
        config = self._loaded().config
        kinds = getattr(config, "layer_types", None) or []
        for layer, kind in enumerate(kinds):
            if kind == "sliding_attention" and windows[layer] is None:
                raise self._unsupported(f"layer {layer} hides its sliding window")
        stated = getattr(config, "sliding_window", None)
        if stated and not kinds and not any(windows.values()):
            raise self._unsupported("it hides its sliding window")

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            raise ModelError("the runner is closed")
        return self._model

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.info.architecture}: {reason}")


def _cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache in a model's forward."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
