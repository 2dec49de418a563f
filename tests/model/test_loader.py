from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.models import write_model

from kvxfer.errors import UnsupportedModel, UsageError
from kvxfer.model import inspect_model, loader


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def model_dir(pristine, tmp_path):
    """A copy to damage."""
    return shutil.copytree(pristine, tmp_path / "model")


def edit_config(model_dir, **fields):
    path = model_dir / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_what_is_read(model_dir):
    info = inspect_model(model_dir)
    assert (info.model_type, info.architecture) == ("llama", "LlamaForCausalLM")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (512, 260, (257,))
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [3, 257]}')
    assert inspect_model(model_dir).eos_token_ids == (3, 257)
    (model_dir / "generation_config.json").unlink()
    edit_config(model_dir, eos_token_id=None)
    assert inspect_model(model_dir).eos_token_ids == ()


def test_what_is_read_of_models_with_an_encoder(tmp_path):
    t5, bart = (write_model(tmp_path / family, family) for family in ("t5", "bart"))
    assert inspect_model(bart).max_model_len == 512
    edit_config(bart, max_position_embeddings=64)
    assert inspect_model(bart).max_model_len == 64
    assert inspect_model(t5).max_model_len == 512, "what T5 was trained with"
    edit_config(t5, n_positions=128)
    info = inspect_model(t5)
    assert (info.max_model_len, info.is_encoder_decoder) == (128, True)
    assert info.architecture == "T5ForConditionalGeneration"


def test_where_the_decoders_start_comes_from(tmp_path, pristine):
    assert inspect_model(pristine).decoder_start_token_id is None
    assert not inspect_model(pristine).is_encoder_decoder
    t5 = write_model(tmp_path / "t5", "t5")
    (t5 / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    assert inspect_model(t5).decoder_start_token_id == 7
    (t5 / "generation_config.json").write_text('{"bos_token_id": 9}')
    assert inspect_model(t5).decoder_start_token_id == 258
    edit_config(t5, decoder_start_token_id=None)
    assert inspect_model(t5).decoder_start_token_id == 9
    (t5 / "generation_config.json").unlink()
    edit_config(t5, bos_token_id=None)
    for wrong in (None, -1, 260, [1, 2]):
        edit_config(t5, decoder_start_token_id=wrong)
        with pytest.raises(UnsupportedModel, match="decoder_start_token_id is"):
            inspect_model(t5)


def test_a_tokenizer_is_not_needed_here(model_dir):
    (model_dir / "tokenizer.json").unlink()
    inspect_model(model_dir)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder models of type llama are not run, only"),
        (
            {"is_encoder_decoder": True, "model_type": "t5", "architectures": ["T5EncoderModel"]},
            "only those named ...ForConditionalGeneration",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "ForCausalLM"),
        ({"architectures": []}, r"\(none named\)"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba keeps state"),
        ({"model_type": "rwkv"}, "rwkv keeps state"),
        ({"model_type": "jamba"}, "jamba keeps state"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE of type dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope"),
    ],
)
def test_models_that_are_not_run(model_dir, fields, reason):
    edit_config(model_dir, **fields)
    with pytest.raises(UnsupportedModel, match=reason):
        inspect_model(model_dir)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vocab_size": "many"}, r"config.json: Expected `int`.*vocab_size"),
        ({"vocab_size": 0}, "positive vocab_size"),
        ({"model_type": ...}, "missing required field `model_type`"),
        ({"max_position_embeddings": ...}, "positive vocab_size and max_position_embeddings"),
        ({"max_position_embeddings": -1}, "positive vocab_size and max_position_embeddings"),
    ],
)
def test_configs_that_make_no_sense(model_dir, fields, reason):
    edit_config(model_dir, **fields)
    with pytest.raises(UsageError, match=reason) as caught:
        inspect_model(model_dir)
    assert (caught.value.field, caught.value.value) == ("model", str(model_dir))
    assert "\n" not in str(caught.value)


def cut_config(model_dir):
    (model_dir / "config.json").write_text('{"model_type": "lla')


def garble_config(model_dir):
    (model_dir / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')


def drop_weights(model_dir):
    (model_dir / "model.safetensors").unlink()


def index_of(*names):
    def write(model_dir):
        (model_dir / "model.safetensors").rename(model_dir / "a.safetensors")
        index = {"weight_map": {str(i): name for i, name in enumerate(names)}}
        (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "not a directory"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (cut_config, "config.json: Input data was truncated"),
        (garble_config, "config.json: Invalid UTF-8"),
        (lambda d: (d / "generation_config.json").write_text("[]"), "generation_config.json: "),
        (drop_weights, "no weights"),
        (index_of(), "no weights"),
        (index_of("a.safetensors", "b.safetensors"), "'b.safetensors', which is not there"),
        (index_of("a.safetensors", "../model/a.safetensors"), "'../model/a.safetensors'"),
    ],
)
def test_directories_that_are_no_model(model_dir, damage, reason):
    damage(model_dir)
    with pytest.raises(UsageError, match=reason) as caught:
        inspect_model(model_dir)
    assert (caught.value.field, caught.value.value) == ("model", str(model_dir))
    assert "\n" not in str(caught.value)


def test_shards_count_as_weights(model_dir):
    index_of("a.safetensors")(model_dir)
    inspect_model(model_dir)


def test_the_fingerprint_is_of_config_and_weights_only(model_dir, pristine, tmp_path):
    found = inspect_model(model_dir).fingerprint
    assert found == inspect_model(pristine).fingerprint
    (model_dir / "tokenizer.json").unlink()
    assert inspect_model(model_dir).fingerprint == found
    weights = model_dir / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    one_bit = inspect_model(model_dir).fingerprint
    edit_config(model_dir, rms_norm_eps=1e-5)
    other_config = inspect_model(model_dir).fingerprint
    other_seed = inspect_model(write_model(tmp_path / "other", seed=1)).fingerprint
    assert len({found, one_bit, other_config, other_seed}) == 4


def test_large_files_are_sampled_over_their_whole_length(model_dir):
    weights = model_dir / "model.safetensors"
    size = loader.SAMPLED_ABOVE_BYTES + (1 << 20)
    os.truncate(weights, size)  # sparse: takes no disk
    seen = {inspect_model(model_dir).fingerprint}
    for offset in (0, (size - loader.SAMPLE_BYTES) * 31 // 63, size - 1):
        with weights.open("r+b") as file:
            file.seek(offset)
            file.write(b"\x7f")
        seen.add(inspect_model(model_dir).fingerprint)
    os.truncate(weights, size + 1)
    seen.add(inspect_model(model_dir).fingerprint)
    assert len(seen) == 5


def test_loading_says_why_it_cannot(model_dir):
    info = inspect_model(model_dir)
    with pytest.raises(UsageError, match="dtype: 'int8'"):
        loader.load_model(info, "cpu", "int8")
    os.truncate(model_dir / "model.safetensors", 5000)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM cannot be loaded") as caught:
        loader.load_model(info, "cpu", None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("gpu", "Expected one of"), ("meta", "must be cpu or cuda"), ("cuda:99", "torch sees")],
)
def test_devices_that_are_not_there(pristine, device, reason):
    with pytest.raises(UsageError, match=f"device: '{device}': .*{reason}") as caught:
        loader.load_model(inspect_model(pristine), device, None)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_made_up(model_dir):
    from safetensors.torch import load_file, save_file

    weights = load_file(model_dir / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack 1 tensors, model.layers.2.mlp.up_proj"):
        loader.load_model(inspect_model(model_dir), "cpu", None)


def test_the_cpu_runs_in_fp32_unless_told(model_dir):
    import torch

    info = inspect_model(write_model(model_dir, dtype="bfloat16"))
    assert loader.load_model(info, "cpu", None).dtype == torch.float32
    assert loader.load_model(info, "cpu", "bfloat16").dtype == torch.bfloat16


def test_looking_at_a_model_imports_neither_torch_nor_transformers(pristine):
    code = (
        "import sys, pathlib; from kvxfer.model import inspect_model, SampleSpec, Tokenizer;"
        "d = pathlib.Path(sys.argv[1]); inspect_model(d); SampleSpec(0.5);"
        "Tokenizer.load(d).encode('a');"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(pristine)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
