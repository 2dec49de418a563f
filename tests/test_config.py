"""Options of a worker, resolved once."""

import dataclasses
import math
from pathlib import Path

import pytest

from kvxfer.config import (
    LAYOUT_VARIABLE,
    LONGEST_WORKER_ID,
    WorkerOptions,
    check_device,
    resolve,
)
from kvxfer.errors import UsageError


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(LAYOUT_VARIABLE, raising=False)


def options(**changes):
    return WorkerOptions(model=Path("m"), **changes)


def test_defaults_resolve_to_a_new_object():
    given = options()
    found = resolve(given, "prefill")
    assert found is not given
    assert found.kv_cache_layout == "LBHNC"
    assert found.worker_id.startswith("prefill-")
    assert resolve(given, "prefill").worker_id != found.worker_id
    unchanged = {"worker_id", "kv_cache_layout"}
    for field in dataclasses.fields(given):
        if field.name not in unchanged:
            assert getattr(found, field.name) == getattr(given, field.name)


def test_what_was_given_stays():
    found = resolve(options(worker_id="mine", kv_cache_layout="BHLNC"), "decode")
    assert (found.worker_id, found.kv_cache_layout) == ("mine", "BHLNC")


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().device = "cpu"


@pytest.mark.parametrize(
    "flag, variable, layout, reason",
    [
        ("auto", None, "LBHNC", "the default"),
        ("auto", "BLNHC", "BLNHC", LAYOUT_VARIABLE),
        ("LHBNC", "BLNHC", "LHBNC", "--kv-cache-layout"),
        ("LHBNC", None, "LHBNC", "--kv-cache-layout"),
    ],
)
def test_the_layout_has_one_writer_and_its_reason_is_logged(
    monkeypatch, caplog, flag, variable, layout, reason
):
    if variable:
        monkeypatch.setenv(LAYOUT_VARIABLE, variable)
    with caplog.at_level("INFO"):
        assert resolve(options(kv_cache_layout=flag), "decode").kv_cache_layout == layout
    (record,) = caplog.records
    assert layout in record.message
    assert reason in record.message


REFUSED = [
    ("block_size", 0),
    ("block_size", -16),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", 0),
    ("max_num_batched_tokens", 40),
    ("threads", 0),
    ("max_model_len", -1),
    ("kv_cache_memory_bytes", -1),
    ("memory_budget_bytes", -5),
    ("kv_initial_blocks", -1),
    ("request_timeout_s", 0.0),
    ("request_timeout_s", -1.0),
    ("request_timeout_s", math.nan),
    ("request_timeout_s", math.inf),
    ("peer_timeout_s", 0.0),
    ("peer_timeout_s", math.nan),
    ("worker_id", "x" * (LONGEST_WORKER_ID + 1)),
    ("worker_id", "ä" * (LONGEST_WORKER_ID // 2 + 1)),
]


@pytest.mark.parametrize("field, value", REFUSED)
def test_a_value_that_cannot_be_is_named(field, value):
    with pytest.raises(UsageError) as error:
        resolve(options(**{field: value}), "decode")
    assert error.value.field == field
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_that_may_be(name):
    assert check_device(name) == name


@pytest.mark.parametrize("name", ["", "tpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu\n", "cpu:0"])
def test_devices_that_cannot_be(name):
    with pytest.raises(UsageError, match="device"):
        check_device(name)
