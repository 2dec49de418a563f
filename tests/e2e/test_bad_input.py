"""Bad input gets one clear line that names the field and the value, and leaves nothing behind.

Each command is a process of its own. One of each kind is started as a user starts it; the others,
which would only import the same again, are forked from a process that has.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.commands import KVXFER, TINY_MODEL, run
from support.fork_server import ForkServer

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def copy_model(target: Path, *names: str) -> Path:
    target.mkdir()
    for name in names:
        shutil.copy(TINY_MODEL / name, target / name)
    return target


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        (["--layout-prefill", "LBXNC"], ("layout_prefill", "LBXNC", "LBHNC")),
        (["--layout-decode", "nope"], ("layout_decode", "nope")),
        (["--device", "tpu"], ("device", "tpu", "cuda")),
        (["--lane", "sideways"], ("lane", "sideways", "push")),
        (["--max-new-tokens", "0"], ("max_new_tokens", "0")),
        (["--max-new-tokens", "many"], ("max-new-tokens", "many")),
        (["--no-such-option"], ("no-such-option",)),
        (["--kv-commit", "never"], ("kv-commit", "never")),
        (["--prompt", ""], ("prompt", "empty")),
        (["--prompt", "word " * 2000], ("prompt", "word", "2048")),
        (["--prompt-file", "/nonexistent/prompts"], ("prompt_file", "/nonexistent/prompts")),
        (["--model", "/nonexistent/model"], ("model", "/nonexistent/model")),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_demo_options(
    options: list[str], mentioned: tuple[str, ...], fork_server: ForkServer
) -> None:
    done = fork_server.run("kvxfer.cli", "demo", *options)
    done.check_one_clear_line(2, *mentioned)


def test_a_demo_option_as_a_user_gives_it() -> None:
    run(*KVXFER, "demo", "--lane", "sideways").check_one_clear_line(2, "lane", "sideways", "push")


def test_model_without_config(tmp_path: Path, fork_server: ForkServer) -> None:
    model = copy_model(tmp_path / "m", "model.safetensors", "tokenizer.json")
    done = fork_server.run("kvxfer.cli", "demo", "--model", str(model))
    done.check_one_clear_line(2, "model", "config.json")


def test_model_without_weights(tmp_path: Path, fork_server: ForkServer) -> None:
    model = copy_model(tmp_path / "m", "config.json", "tokenizer.json")
    done = fork_server.run("kvxfer.cli", "demo", "--model", str(model))
    done.check_one_clear_line(2, "model", "safetensors")


def test_model_without_tokenizer(tmp_path: Path, fork_server: ForkServer) -> None:
    model = copy_model(tmp_path / "m", "config.json", "model.safetensors")
    done = fork_server.run("kvxfer.cli", "demo", "--model", str(model))
    done.check_one_clear_line(2, "tokenizer.json")


def test_unsupported_architecture(tmp_path: Path, fork_server: ForkServer) -> None:
    model = copy_model(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (model / "config.json").write_text(json.dumps(config))
    done = fork_server.run("kvxfer.cli", "demo", "--model", str(model))
    done.check_one_clear_line(1, "mamba")


def test_device_that_is_not_there(fork_server: ForkServer) -> None:
    """Known only once the worker has imported torch."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = fork_server.run("prefill", "--model", str(TINY_MODEL), "--device", "cuda")
    assert done.code == 2, done
    assert "Traceback" not in done.err
    last = done.err.strip().splitlines()[-1]
    assert last == "prefill: error: device: 'cuda': torch sees 0 CUDA device(s)"


@pytest.mark.parametrize("module", ["prefill", "decode"])
def test_port_in_use(module: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        more = ["--prefill", "tcp://127.0.0.1:9"] if module == "decode" else []
        done = run(
            sys.executable, "-m", module, "--model", str(TINY_MODEL), "--listen", address, *more
        )
    assert done.code == 2, done
    assert "Traceback" not in done.err
    last = done.err.strip().splitlines()[-1]
    assert "error: listen" in last
    assert address in last
    assert "in use" in last


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--listen", "tcp://0.0.0.0:5601"),
        ("--listen", "ipc:///tmp/x"),
        ("--kv-cache-layout", "XX"),
        ("--device", "gpu"),
        ("--lane", "both"),
        ("--block-size", "0"),
        ("--threads", "-1"),
        ("--tensor-parallel-size", "0"),
        ("--kv-cache-memory-bytes", "-5"),
        ("--request-timeout-s", "0"),
        ("--max-num-batched-tokens", "100"),
        ("--connector", "carrier-pigeon"),
    ],
)
def test_worker_options(option: str, value: str, fork_server: ForkServer) -> None:
    done = fork_server.run("prefill", "--model", str(TINY_MODEL), option, value)
    assert done.code == 2, done
    assert "Traceback" not in done.err
    last = done.err.strip().splitlines()[-1]
    assert option.removeprefix("--").replace("-", "_") in last
    assert value in last


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ((), ("listen", "tcp://10.1.2.3:5601", "key_file")),
        (("--key-file", "/nowhere/x.key"), ("key_file", "/nowhere/x.key", "peer_keys")),
        (("--peer-keys", "/nowhere"), ("peer_keys", "/nowhere", "key_file")),
    ],
    ids=["none", "no allowed ones", "not its own"],
)
def test_a_worker_that_others_could_reach_needs_keys(
    role: str, keys: tuple[str, ...], named: tuple[str, ...], fork_server: ForkServer
) -> None:
    listen = ("--listen", "tcp://10.1.2.3:5601")
    done = fork_server.run(role, "--model", str(TINY_MODEL), *listen, *keys)
    done.check_one_clear_line(2, *named)
