"""Options from flags, KVXFER_* variables and one TOML file: precedence, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pytest
from cyclopts import CycloptsError, Parameter

from kvxfer.command import Settings, parse
from kvxfer.config import LAYOUT_VARIABLE, WorkerOptions
from kvxfer.config_file import HIDDEN, ROUTER_KEYS, SERVE_KEYS
from kvxfer.errors import UsageError
from kvxfer.serve.options import RouterOptions, ServeOptions

DEFAULTS = ServeOptions()


def decode(
    options: WorkerOptions, *, prefill: Annotated[list[str], Parameter(consume_multiple=True)]
) -> int:
    raise AssertionError("is only parsed")


def prefill(options: WorkerOptions) -> int:
    raise AssertionError("is only parsed")


def router(options: RouterOptions) -> int:
    raise AssertionError("is only parsed")


def serve(*, options: ServeOptions = DEFAULTS, worker: WorkerOptions) -> int:
    raise AssertionError("is only parsed")


COMMANDS = {"prefill": prefill, "decode": decode, "router": router, "serve": serve}


@pytest.fixture
def ask(tmp_path):
    """What a command gets of a file's text, variables and flags."""

    def asked(section, text="", *flags, serve_as="", **variables):
        path = tmp_path / "kvxfer.toml"
        path.write_text(text)
        settings = Settings(section, serve_as, variables)
        return parse(COMMANDS[section], ["--config", str(path), *flags], settings)

    return asked


def test_the_names_of_options_are_those_of_the_file():
    """Those that workers know without importing what serves HTTP."""
    assert {field.name for field in fields(RouterOptions)} - HIDDEN == ROUTER_KEYS
    assert {field.name for field in fields(ServeOptions)} == SERVE_KEYS


PRECEDENCE = [
    ('block_size = 64\nmodel = "m"', ["--block-size", "8"], {"KVXFER_BLOCK_SIZE": "32"}, 8),
    ('block_size = 64\nmodel = "m"', [], {"KVXFER_BLOCK_SIZE": "32"}, 32),
    ('block_size = 64\nmodel = "m"', [], {"KVXFER_BLOCK_SIZE": ""}, 64),
    ('block-size = 64\nmodel = "m"', [], {}, 64),
    ('block_size = 64\nmodel = "m"\n[prefill]\nblock-size = 48', [], {}, 48),
    ('block_size = 64\nmodel = "m"\n[decode]\nblock-size = 48', [], {}, 64),
    ('model = "m"', [], {}, 16),
]


@pytest.mark.parametrize(("text", "flags", "variables", "expected"), PRECEDENCE)
def test_flags_rank_above_variables_these_above_the_file(ask, text, flags, variables, expected):
    found = ask("prefill", text, *flags, **variables)["options"]
    assert found.block_size == expected
    assert found.model == Path("m")


def test_all_types_come_from_a_file(ask):
    text = """
    model = "m"
    port = 8000                        # the router's
    enable_prefix_caching = false
    enable-extensible-kv-cache = true
    gpu_memory_utilization = 1
    kv_commit = "elastic"
    [decode]
    prefill = ["ipc:///a", "tcp://b:1"]
    workers = 3                        # serve's
    """
    found = ask("decode", text)
    options = found["options"]
    assert found["prefill"] == ["ipc:///a", "tcp://b:1"]
    assert (options.enable_prefix_caching, options.enable_extensible_kv_cache) == (False, True)
    assert (options.gpu_memory_utilization, options.kv_commit) == (1.0, "elastic")


def test_lists_and_switches_come_from_variables(ask):
    variables = {"KVXFER_PREFILL": "a, b c", "KVXFER_LANE_TEST": "false", "KVXFER_MODEL": "m"}
    found = ask("decode", "", **variables)
    assert found["prefill"] == ["a", "b", "c"]
    assert found["options"].lane_test is False


def test_the_file_may_be_named_by_a_variable(tmp_path):
    (tmp_path / "f").write_text('model = "m"')
    settings = Settings("prefill", environment={"KVXFER_CONFIG": str(tmp_path / "f")})
    assert parse(prefill, [], settings)["options"].model == Path("m")


def test_flags_replace_lists_of_the_file(ask):
    text = 'model = "m"\n[router]\nprefill = ["a", "b"]\ndecode = ["c"]\napi_key = ["k"]'
    found = ask("router", text, "--prefill", "x")["options"]
    assert (found.prefill, found.decode, found.api_key) == (("x",), ("c",), ("k",))


def test_the_layouts_variable_keeps_its_reader_and_ranks_above_the_file(ask):
    text = 'model = "m"\nkv_cache_layout = "BHLNC"'
    assert ask("prefill", text)["options"].kv_cache_layout == "BHLNC"
    found = ask("prefill", text, **{LAYOUT_VARIABLE: "LHBNC"})["options"]
    assert found.kv_cache_layout == "auto"
    found = ask("prefill", text, "--kv-cache-layout", "BLNHC", **{LAYOUT_VARIABLE: "LHBNC"})
    assert found["options"].kv_cache_layout == "BLNHC"


SERVE = """
model = "m"
block_size = 32
[prefill]
workers = 2
kv_cache_layout = "BHLNC"
[decode]
workers = 3
block_size = 64
request_timeout_s = 7
[router]
port = 8123
request_timeout_s = 9.5
"""


def test_serve_reads_every_table_for_its_part(ask):
    found = ask("serve", SERVE)
    options = found["options"]
    assert (options.prefill, options.decode, options.port) == (2, 3, 8123)
    assert (found["worker"].block_size, found["worker"].request_timeout_s) == (32, 9.5)
    as_prefill = ask("serve", SERVE, serve_as="prefill")["worker"]
    as_decode = ask("serve", SERVE, serve_as="decode")["worker"]
    assert (as_prefill.block_size, as_prefill.kv_cache_layout) == (32, "BHLNC")
    assert as_prefill.request_timeout_s == 120.0
    assert (as_decode.block_size, as_decode.request_timeout_s) == (64, 7.0)
    flagged = ask("serve", SERVE, "--block-size", "8", "--prefill", "5", serve_as="decode")
    assert (flagged["worker"].block_size, flagged["options"].prefill) == (8, 5)
    assert ask("serve", 'model = "m"\nprefill = 4')["options"].prefill == 4


FILE = "kvxfer.toml"
WRONG = [
    ("prefill", 'blok_size = 1\nmodel = "m"', ("blok_size", "did you mean block_size?", FILE)),
    ("prefill", "[prefill]\nblok-size = 1", ("blok-size", "block_size", f"{FILE} [prefill]")),
    ("prefill", "[decode]\nblok-size = 1", ("blok-size", "block_size", f"{FILE} [decode]")),
    ("prefill", "[prefil]\nblock_size = 1", ("[prefil]", "did you mean prefill?", FILE)),
    ("prefill", "zzz = 1", ("zzz", "no such option", FILE)),
    ("prefill", "ready_fd = 1", ("ready_fd", "no such option", FILE)),
    ("prefill", 'config = "x"', ("config", "no such option", FILE)),
    ("prefill", "[router]\nblock_size = 1", ("block_size", f"{FILE} [router]")),
    ("prefill", "block_size = 1.5", ("block_size", "1.5", "a whole number is wanted", FILE)),
    ("prefill", "block_size = true", ("block_size", "True", "a whole number is wanted")),
    ("prefill", 'block_size = "16"', ("block_size", "'16'", "a whole number is wanted")),
    ("prefill", "block_size = [16]", ("block_size", "[16]", "not a list")),
    ("prefill", "model = 1979-05-27", ("model", "a text is wanted")),
    ("prefill", "model = 5", ("model", "5", "a text is wanted")),
    ("prefill", "enable_prefix_caching = 1", ("enable_prefix_caching", "true or false")),
    ("prefill", 'kv_low_watermark = "low"', ("kv_low_watermark", "low", "a number is wanted")),
    ("prefill", 'model = "m"\nkv_commit = "some"', ("kv_commit", "some", "elastic", FILE)),
    ("prefill", "block_size = 1\nblock-size = 2", ("block-size", "block_size says it too", FILE)),
    ("prefill", "a = 1\na = 2\nb = 1", ("config", "TOML", "line 2", FILE)),
    ("prefill", "block_size =\n", ("config", "TOML", "line 1", FILE)),
    ("decode", 'model = "m"\n[decode]\nprefill = [1]', ("prefill", "[1]", "a text is wanted")),
    ("router", 'model = "m"\nprefill = 2', ("prefill", "2", "a text is wanted")),
    ("serve", "[prefill]\nworkers = 0.5", ("workers", "0.5", "whole number", "[prefill]")),
    ("serve", '[decode]\nprefill = ["a"]', ("prefill", "['a']", f"{FILE} [decode]")),
    ("serve", "[prefill]\nport = 1", ("port", f"{FILE} [prefill]")),
]


@pytest.mark.parametrize(("section", "text", "mentioned"), WRONG)
def test_a_wrong_file_is_one_line_that_names_it(ask, section, text, mentioned):
    with pytest.raises((UsageError, CycloptsError)) as refused:
        ask(section, text, "--listen", "x") if section == "prefill" else ask(section, text)
    told = str(refused.value).rstrip()
    assert "\n" not in told
    for word in mentioned:
        assert word in told


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "f.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=str(path)) as refused:
        parse(prefill, ["--config", str(path)], Settings("prefill", environment={}))
    assert refused.value.field == "config"


WRONG_VARIABLES = [
    ({"KVXFER_BLOK_SIZE": "8"}, ("KVXFER_BLOK_SIZE", "did you mean KVXFER_BLOCK_SIZE?")),
    ({"KVXFER_BLOCK_SIZE": "many"}, ("KVXFER_BLOCK_SIZE", "many", "int")),
    ({"KVXFER_BLOCK_SIZE": "1.5"}, ("KVXFER_BLOCK_SIZE", "1.5", "whole")),
    ({"KVXFER_KV_COMMIT": "x"}, ("KVXFER_KV_COMMIT", "x", "elastic")),
]


@pytest.mark.parametrize(("variables", "mentioned"), WRONG_VARIABLES)
def test_a_wrong_variable_is_one_line_that_names_it(ask, variables, mentioned):
    with pytest.raises((UsageError, CycloptsError)) as refused:
        ask("prefill", 'model = "m"', **variables)
    for word in mentioned:
        assert word in str(refused.value)


def test_variables_of_other_commands_are_left_alone(ask):
    """KVXFER_PREFILL is decode's, KVXFER_PEER_DIR a connector's."""
    others = {"KVXFER_PREFILL": "a", "KVXFER_PEER_DIR": "/x", "KVXFER_API_KEY": "k"}
    assert (
        ask("prefill", 'model = "m"', **others)["options"]
        == ask("prefill", 'model = "m"')["options"]
    )


def test_a_flag_that_is_no_whole_number_is_refused(ask):
    with pytest.raises(UsageError, match=r"block.size.*1\.5"):
        ask("prefill", 'model = "m"', "--block-size", "1.5")
