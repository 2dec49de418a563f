"""Runs a model over the paged cache: prefill chunks and decode batches, to tokens.

A runner is used by one thread. Its forward passes are bit-reproducible on one machine: fixed
threads, at least 4 rows (see packing), one attention call per sequence. Prefill in the same chunks
and decode in any batch give the same bits of KV and the same tokens, whatever the cache's layout
and block ids and wherever the KV was computed. Models with an encoder run one sequence a pass (see
encoder_decoder), op by op.

On a GPU, warm-up records the decode step (see decode_graph) and decode_step repeats it; prefill,
and everything on the CPU, runs op by op. The bits of a GPU depend on the batch.

A rank of a tensor-parallel model runs as the whole does, over its own heads; all ranks make the
same calls, and choose from the same logits. Supported: transformers 5.17 to 5.39.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import ModelError, UnsupportedModel, UsageError
from kvxfer.model import encoder_decoder, probe
from kvxfer.model.checks import check_steps, check_views
from kvxfer.model.choosing import choose
from kvxfer.model.decode_graph import CudaRecorder, DecodeGraphs, Recorder
from kvxfer.model.groups import ModelGroups, Place
from kvxfer.model.loader import ModelInfo, cache_argument, load_model
from kvxfer.model.memory import tells_lack_of_memory
from kvxfer.model.packing import MIN_ROWS, NULL_BLOCK, DecodeStep, PackedStep, SequenceStep, pack
from kvxfer.model.paged_cache import (
    STEP_ARGUMENT,
    DecodeCache,
    PagedCache,
    RecordingCache,
    Views,
)
from kvxfer.model.row_classes import padded_rows
from kvxfer.model.sampling import SampleSpec
from kvxfer.model.tensor_parallel import Ranks, TensorParallel, left_on_failure, shared_heads

if TYPE_CHECKING:
    from transformers import EncoderDecoderCache, PreTrainedModel

__all__ = ["ModelRunner", "SequenceStep"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """load, probe_specs, bind, warm_up; then prefill_chunk and decode_step; close."""

    def __init__(
        self,
        info: ModelInfo,
        model: PreTrainedModel,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        """Owns `ranks`, of which `model` is this one's part."""
        self.info = info
        self._model: PreTrainedModel | None = model
        self._device = device
        self._cache_argument = cache_argument(model)
        self._groups: ModelGroups | None = None
        self._views: tuple[tuple[torch.Tensor, ...], ...] = ()
        self._graphs: DecodeGraphs | None = None
        is_exact = device.type == "cpu" and model.dtype == torch.float32
        is_packed = not info.is_encoder_decoder
        self._min_rows = padded_rows(model) if is_exact and is_packed else MIN_ROWS
        if ranks is not None:
            self._min_rows = ranks.largest(self._min_rows, device)
        self.ranks = ranks

    @classmethod
    def load(
        cls,
        info: ModelInfo,
        device: str,
        dtype: str | None,
        threads: int,
        tensor_parallel: TensorParallel | None = None,
    ) -> ModelRunner:
        """Load the weights onto `device` and set torch's threads for the whole process.

        `dtype` and errors as in `load_model`. With `tensor_parallel` every rank's process calls
        this, and each method below, alike; WorkerDied when one is gone.
        """
        if threads < 1:
            raise UsageError("threads", threads, "must be at least 1")
        torch.set_num_threads(threads)
        ranks = tensor_parallel.join(device) if tensor_parallel else None
        with left_on_failure(ranks):
            return cls(info, load_model(info, device, dtype, ranks), torch.device(device), ranks)

    def probe_specs(self, block_size: int) -> tuple[KVCacheSpec, ...]:
        """The groups of this model's layers, seen in a forward pass of one token, not guessed from
        the config's field names. Raises UnsupportedModel when a layer has no KV, or when attention
        does not run as this package needs it to."""
        config, run = self._loaded().config, probe.Runs(self._run, self._run_decoder)
        found = probe.model_layers(self.info, config, run, self._device)
        self._groups = ModelGroups.of(*found, block_size)
        if self.ranks is not None:
            self._groups = shared_heads(self._groups, config, self.ranks.size)
        return self._groups.specs

    def bind(self, views: Views) -> None:
        """Use `views` from now on: by group, one tensor [B, H, N, C] a layer, of the probed spec's
        shape and dtype, any strides. The caller owns the memory and keeps it mapped; of uncommitted
        blocks only addresses are computed. Recorded decode steps are dropped unless the views are
        the very same tensors."""
        if self._groups is None:
            raise ModelError("the model's groups were not probed")
        check_views(self._groups.specs, views)
        old, new = (
            [view for group in by_group for view in group] for by_group in (self._views, views)
        )
        if len(new) != len(old) or any(a is not b for a, b in zip(new, old, strict=True)):
            self._graphs = None
        self._views = tuple(tuple(group) for group in views)

    def warm_up(
        self,
        max_tokens: int,
        max_batch: int,
        max_context: int | None = None,
        capture_graphs: bool = True,
    ) -> None:
        """Run the largest prefill chunk and the largest decode batch, at the end of a context of
        `max_context` tokens (default: the model's longest), so that the memory they take was taken
        once; an encoder takes the whole context in one. Every block id is 0: only the null blocks
        are touched, and zeroed first. On a GPU decode steps of up to `max_batch` are recorded
        before, unless `capture_graphs` is False."""
        groups = self._bound()
        context = min(max_context or self.info.max_model_len, self.info.max_model_len)
        tables = [BlockTable([NULL_BLOCK] * spec.num_blocks(context)) for spec in groups.specs]
        for group in self._views:
            for view in group:
                view[NULL_BLOCK].zero_()
        if capture_graphs and self._device.type == "cuda":
            self.record_decode(max_batch)
        has_encoder = self.info.is_encoder_decoder
        num_tokens = context if has_encoder else min(max_tokens, context)
        spec = SampleSpec()
        self.prefill_chunk(SequenceStep([0] * num_tokens, context - num_tokens, tables, spec))
        if context > 1:
            num_encoder = context if has_encoder else 0
            one = SequenceStep([0], context - 1, tables, spec, num_encoder)
            self.decode_step([one] * max_batch)

    def record_decode(self, max_batch: int, record: Recorder | None = None) -> bool:
        """Record the decode step of up to `max_batch` sequences; decode_step repeats it from then
        on. Only the null block is touched. `record` defaults to CUDA graphs.

        False, with the reason logged, when it cannot be recorded: decode runs op by op as before.
        """
        self._graphs = None
        try:
            if self.info.is_encoder_decoder:
                raise ModelError("a model with an encoder runs one sequence a pass")
            self._graphs = DecodeGraphs(
                self._run,
                self._views,
                self._bound(),
                max_batch,
                self.info.max_model_len,
                record or CudaRecorder(self._device),
            )
        except ModelError as error:
            logger.warning("decode steps are not recorded as graphs: %s", error)
        return self._graphs is not None

    def logits(
        self, steps: Sequence[SequenceStep], on_written: Callable[[Place], None] | None = None
    ) -> torch.Tensor:
        """A forward pass op by op, its KV written: [len(steps), V] for each sequence's last token,
        on the device. What the methods below choose from; errors as theirs."""
        groups = self._bound()
        check_steps(steps, self.info)
        start = self.info.decoder_start_token_id
        if start is not None:
            run, views = self._run_decoder, self._views
            logits = encoder_decoder.run_steps(run, views, groups, steps, start)
        else:
            packed = pack(steps, groups, self._device, self._min_rows)
            cache = PagedCache(self._views, packed, on_written)
            logits = self._run(packed, cache)[: len(steps)]
        self._finish()
        return logits

    def decode_logits(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """As `logits`, for one new token a sequence; recorded work is repeated where there is any.
        Valid until the next step."""
        logits, _ = self._decode(steps)
        self._finish()
        return logits

    def _decode(self, steps: Sequence[SequenceStep]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits, and what is likeliest where that was recorded. Work that was recorded may
        still be under way."""
        graphs = self._graphs
        if graphs is None or not graphs.holds(steps):
            return self.logits(steps), None
        check_steps(steps, self.info)
        return graphs.run(steps)

    def verify(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        """One forward pass, its KV written: for each step logits [len(step.tokens), V], of what
        follows each of its tokens, on the device. Errors as prefill_chunk, and ModelError for a
        model with an encoder.

        A token's bits may differ from those of a decode step, whose attention has a single query.
        """
        if self.info.is_encoder_decoder:
            raise ModelError(
                f"{self.info.architecture}: a model with an encoder verifies no drafts"
            )
        if not steps:
            return []
        groups = self._bound()
        check_steps(steps, self.info)
        packed = pack(steps, groups, self._device, self._min_rows, all_rows=True)
        logits = self._run(packed, PagedCache(self._views, packed))
        self._finish()
        return [logits[span.row : span.row + span.num_rows] for span in packed.spans]

    @tells_lack_of_memory
    def prefill_chunk(
        self, step: SequenceStep, on_written: Callable[[Place], None] | None = None
    ) -> int | None:
        """Write the KV of the chunk's tokens; the token that follows them if `step.sample` is set.
        An encoder's prompt is one chunk: cross attention's KV is written, and that of the decoder's
        start, which the token follows.

        On return the KV is in memory. `on_written` is told of each layer before, when all that
        writes its KV was given to the device, in the layers' order; not with an encoder. Raises
        UsageError for a token outside the vocabulary, ModelError for a step that the model or its
        block tables cannot hold; nothing was written.
        ModelOutOfMemory when its own allocations fail: it may be tried again.
        """
        if step.num_encoder_tokens:
            raise ModelError("a prompt of tokens that the encoder had before")
        logits = self.logits([step], on_written)
        return choose(self.info, [step], logits)[0] if step.sample is not None else None

    @tells_lack_of_memory
    def decode_step(self, steps: Sequence[SequenceStep]) -> list[int]:
        """One forward pass for several sequences (with an encoder, one each); the token that
        follows each. As prefill_chunk, and NotFinite where some sequences have none: this is the
        others' step all the same."""
        if self.info.is_encoder_decoder and not all(step.num_encoder_tokens for step in steps):
            raise ModelError("a decode step must say how many tokens the encoder had")
        if not steps:
            return []
        logits, best = self._decode(steps)
        self._finish()
        return choose(self.info, steps, logits, best)

    def close(self) -> None:
        """Drop the weights, the views and what was recorded; leave the ranks. Idempotent."""
        self._graphs = None
        self._model = None
        self._views = ()
        if self.ranks is not None:
            self.ranks.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _bound(self) -> ModelGroups:
        if self._groups is None or not self._views:
            raise ModelError("no cache was bound")
        return self._groups

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
            raise UnsupportedModel("it does not choose the rows of its logits")
        return logits

    @torch.inference_mode()
    def _run_decoder(self, cache: EncoderDecoderCache, **given: Any) -> torch.Tensor:
        output = self._loaded()(use_cache=True, **{self._cache_argument: cache}, **given)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            raise ModelError("the runner is closed")
        return self._model
