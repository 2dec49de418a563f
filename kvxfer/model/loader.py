"""A model directory: what it is, cheaply; then its weights, as a transformers model.

Facts relied on (transformers 5.17 and 5.24, read and run):
- from_pretrained fills weights that the files lack with random numbers and only warns, so the
  loading report is asked for and a missing key is refused;
- RoPE of type 'dynamic' and 'longrope' picks its frequencies by the longest position of the whole
  packed batch, so one request would change another's tokens: such models are refused;
- masks that are not causal or causal with a window (chunked attention) never reach an attention
  function of ours, and recurrent state lives in no KV block: refused too.

Importing this module imports neither torch nor transformers: the router reads models with it.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvxfer.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

ATTENTION_NAME: Final = "kvxfer"
DTYPES: Final = ("float32", "float16", "bfloat16")
SAMPLED_ABOVE_BYTES: Final = 1 << 30
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
ATTENTION_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
BATCH_WIDE_ROPE: Final = frozenset({"dynamic", "longrope"})
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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A directory that was looked at and may be loaded."""

    model_dir: Path
    model_type: str
    architecture: str
    max_model_len: int
    """Tokens of the longest sequence, prompt and answer together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """32 hex digits over config.json and the weights; equal KV needs equal fingerprints. Files of
    more than 1 GiB count by name, size and 64 evenly spaced samples of 64 KiB."""


class _Config(msgspec.Struct):
    """The fields of config.json that decide; transformers reads the rest."""

    model_type: str
    vocab_size: int
    architectures: list[str] = []
    max_position_embeddings: int | None = None
    n_positions: int | None = None
    is_encoder_decoder: bool = False
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None
    attention_chunk_size: int | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def inspect_model(model_dir: Path) -> ModelInfo:
    """Read the directory's JSON files and digest its weights.

    Raises UsageError (field 'model') for a directory that is no model, UnsupportedModel for a
    model that cannot be run here by design. Reads every weight byte of files up to 1 GiB.
    """
    if not model_dir.is_dir():
        raise UsageError("model", str(model_dir), "not a directory")
    config = _read_json(model_dir, "config.json", _Config)
    if config is None:
        raise UsageError("model", str(model_dir), "no config.json")
    _check_supported(config)
    max_model_len = config.max_position_embeddings or config.n_positions
    if max_model_len is None or max_model_len < 1 or config.vocab_size < 1:
        reason = "config.json must give a positive vocab_size and max_position_embeddings"
        raise UsageError("model", str(model_dir), reason)
    weights = _weight_files(model_dir)
    generation = _read_json(model_dir, "generation_config.json", _Generation)
    eos = generation.eos_token_id if generation is not None else None
    return ModelInfo(
        model_dir=model_dir,
        model_type=config.model_type,
        architecture=config.architectures[0],
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=_as_tuple(config.eos_token_id if eos is None else eos),
        fingerprint=_fingerprint(model_dir / "config.json", weights),
    )


def load_model(info: ModelInfo, device: str, dtype: str | None) -> PreTrainedModel:
    """The model in evaluation mode on `device`, its attention ours.

    `dtype` None means float32 on the CPU (4 to 8 times faster there than bfloat16 in prefill) and
    the checkpoint's own on a GPU. Raises UsageError for another dtype or a device that is not
    there, UnsupportedModel with transformers' reason when it cannot build the model or the files
    lack weights.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    if dtype is None:
        dtype = "float32" if device == "cpu" else "auto"
    _check_device(device)
    model, report = _from_pretrained(info, dtype)
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"{info.model_dir}: the weight files lack {len(missing)} tensors, {missing[0]} first"
        )
    model.eval().requires_grad_(False)
    moved: PreTrainedModel = model.to(device)
    return moved


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
    logging: Any = transformers.utils.logging
    attention.register(ATTENTION_NAME)
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
            model.set_attn_implementation(ATTENTION_NAME)
    except (OSError, ValueError, RuntimeError, LookupError, ImportError, SafetensorError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UnsupportedModel(
            f"{info.model_dir}: {info.architecture} cannot be loaded: "
            f"{type(error).__name__}: {first_line}"
        ) from error
    return model, report


def _check_supported(config: _Config) -> None:
    name = config.architectures[0] if config.architectures else "(none named)"
    rope_types = _rope_types(config.rope_parameters) | _rope_types(config.rope_scaling)
    batch_wide = sorted(rope_types & BATCH_WIDE_ROPE)
    other_layers = sorted(set(config.layer_types or ()) - ATTENTION_LAYERS)
    if config.is_encoder_decoder:
        reason = "encoder-decoder models are not run"
    elif config.model_type in STATEFUL_TYPES:
        reason = f"{config.model_type} keeps state outside KV blocks"
    elif other_layers:
        reason = f"layer type {other_layers[0]} has no KV blocks of the usual kind"
    elif config.attention_chunk_size is not None:
        reason = "chunked attention is not run"
    elif batch_wide:
        reason = f"RoPE of type {batch_wide[0]} would let one request change another's tokens"
    elif not name.endswith("ForCausalLM"):
        reason = "only architectures named ...ForCausalLM are run"
    else:
        return
    raise UnsupportedModel(f"architecture {name}: {reason}")


def _rope_types(rope: dict[str, Any] | None) -> set[str]:
    """The types named in RoPE parameters, which may be nested by layer type."""
    found: set[str] = set()
    for key, value in (rope or {}).items():
        if isinstance(value, dict):
            found |= _rope_types(value)
        elif key in ("rope_type", "type") and isinstance(value, str):
            found.add(value)
    return found


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
