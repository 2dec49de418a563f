"""A model directory: what it is, cheaply; then its weights, as a transformers model.

Facts relied on (transformers 5.17 and 5.24, read and run):
- from_pretrained fills weights that the files lack with random numbers and only warns, so the
  loading report is asked for and a missing key is refused;
- in models with an encoder set_attn_implementation reaches both halves, which have a config each;
- some version up to 5.24 renamed the forward's argument `past_key_values` to `cache`, and 5.40
  drops the old name; `cache_argument` is the only shim.

Importing this module imports neither torch nor transformers: the router reads models with it.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvxfer.errors import UnsupportedModel, UsageError
from kvxfer.model.config import Config, Generation, check_supported, decoder_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvxfer.model.tensor_parallel import Ranks

T = TypeVar("T")

DTYPES: Final = ("float32", "float16", "bfloat16")
SAMPLED_ABOVE_BYTES: Final = 1 << 30
SAMPLES, SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A directory that was looked at and may be loaded."""

    model_dir: Path
    model_type: str
    architecture: str
    max_model_len: int
    """Tokens of the longest sequence, prompt and answer together; with an encoder the prompt may
    have as many, and the answer, its start included, as many again."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """32 hex digits over config.json and the weights; equal KV needs equal fingerprints. Files of
    more than 1 GiB count by name, size and 64 evenly spaced samples of 64 KiB."""
    decoder_start_token_id: int | None = None
    """What the decoder of a model with an encoder begins with; None for decoder-only models."""

    @property
    def is_encoder_decoder(self) -> bool:
        return self.decoder_start_token_id is not None


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def inspect_model(model_dir: Path) -> ModelInfo:
    """Read the directory's JSON files and digest its weights.

    Raises UsageError (field 'model') for a directory that is no model, UnsupportedModel for a
    model that cannot be run here by design. Reads every weight byte of files up to 1 GiB.
    """
    if not model_dir.is_dir():
        raise UsageError("model", str(model_dir), "not a directory")
    config = _read_json(model_dir, "config.json", Config)
    if config is None:
        raise UsageError("model", str(model_dir), "no config.json")
    check_supported(config)
    max_model_len = config.longest
    if max_model_len is None or max_model_len < 1 or config.vocab_size < 1:
        reason = "config.json must give a positive vocab_size and max_position_embeddings"
        raise UsageError("model", str(model_dir), reason)
    weights = _weight_files(model_dir)
    generation = _read_json(model_dir, "generation_config.json", Generation) or Generation()
    eos = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    return ModelInfo(
        model_dir=model_dir,
        model_type=config.model_type,
        architecture=config.architectures[0],
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=_as_tuple(eos),
        fingerprint=_fingerprint(model_dir / "config.json", weights),
        decoder_start_token_id=decoder_start(config, generation),
    )


def load_model(
    info: ModelInfo, device: str, dtype: str | None, ranks: Ranks | None = None
) -> PreTrainedModel:
    """The model in evaluation mode on `device`, its attention ours; with `ranks` this one's slice
    of it, cut out on the host, which holds the whole model meanwhile.

    `dtype` None means float32 on the CPU (4 to 8 times faster there than bfloat16 in prefill) and
    the checkpoint's own on a GPU. Raises UsageError for another dtype or a device that is not
    there, UnsupportedModel with transformers' reason when it cannot build the model or the files
    lack weights; and as `tensor_parallel.shard`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    if dtype is None:
        dtype = "float32" if device == "cpu" else "auto"
    _check_device(device)
    if ranks is not None:
        _check_size(info, ranks.size)
    model, report = _from_pretrained(info, dtype)
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"{info.model_dir}: the weight files lack {len(missing)} tensors, {missing[0]} first"
        )
    model.eval().requires_grad_(False)
    if ranks is not None:
        from kvxfer.model.tensor_parallel import shard

        shard(model, ranks)
    moved: PreTrainedModel = model.to(device)
    return moved


def cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache in a model's forward."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _check_size(info: ModelInfo, size: int) -> None:
    import transformers

    from kvxfer.model.tensor_parallel import check_config

    auto: Any = transformers.AutoConfig
    try:
        config = auto.from_pretrained(str(info.model_dir), local_files_only=True)
    except (OSError, ValueError, LookupError) as error:
        raise _cannot_load(info, error) from error
    check_config(config, size)


def _check_device(device: str) -> None:
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise UsageError("device", device, str(error).splitlines()[0]) from error
    if wanted.type not in ("cpu", "cuda"):
        raise UsageError("device", device, "must be cpu or cuda")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError("device", device, f"torch sees {torch.cuda.device_count()} CUDA devices")


def _from_pretrained(info: ModelInfo, dtype: str) -> tuple[Any, dict[str, Any]]:
    import transformers
    from safetensors import SafetensorError

    from kvxfer.model import attention

    # Half typed: what from_pretrained returns depends on output_loading_info.
    factory: Any = transformers.AutoModelForCausalLM
    if info.is_encoder_decoder:
        factory = transformers.AutoModelForSeq2SeqLM
    logging: Any = transformers.utils.logging
    attention.register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, report = factory.from_pretrained(
                str(info.model_dir),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            model.set_attn_implementation(
                attention.UNMASKED if info.is_encoder_decoder else attention.PAGED
            )
    except (OSError, ValueError, RuntimeError, LookupError, ImportError, SafetensorError) as error:
        raise _cannot_load(info, error) from error
    return model, report


def _cannot_load(info: ModelInfo, error: Exception) -> UnsupportedModel:
    first_line = (str(error).splitlines() or [""])[0]
    return UnsupportedModel(
        f"{info.model_dir}: {info.architecture} cannot be loaded: "
        f"{type(error).__name__}: {first_line}"
    )


def _read_json(model_dir: Path, name: str, kind: type[T]) -> T | None:
    """The file as `kind`, None where there is none."""
    try:
        raw = (model_dir / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError("model", str(model_dir), f"{name}: {error.strerror}") from error
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError("model", str(model_dir), f"{name}: {error}") from error


def _weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files that transformers will read, sorted; each is there."""
    single = model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    index = _read_json(model_dir, "model.safetensors.index.json", _WeightIndex)
    if index is None or not index.weight_map:
        reason = "no weights: neither model.safetensors nor model.safetensors.index.json"
        raise UsageError("model", str(model_dir), reason)
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if Path(name).name != name or not (model_dir / name).is_file():
            reason = f"model.safetensors.index.json names {name!r}, which is not there"
            raise UsageError("model", str(model_dir), reason)
    return [model_dir / name for name in names]


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _fingerprint(config: Path, weights: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in (config, *weights):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        digest.update(_content_digest(path, size))
    return digest.hexdigest()


def _content_digest(path: Path, size_bytes: int) -> bytes:
    with path.open("rb") as file:
        if size_bytes <= SAMPLED_ABOVE_BYTES:
            return hashlib.file_digest(file, "blake2b").digest()
        digest = hashlib.blake2b()
        for i in range(SAMPLES):
            file.seek((size_bytes - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.digest()
