"""Options of a worker, resolved once."""

import dataclasses
import math
from pathlib import Path

import pytest

from kvxfer.config import (
    DEFAULT_CONNECTORS,
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
    assert found.connector == DEFAULT_CONNECTORS
    assert not found.is_connector_named
    assert found.worker_id.startswith("prefill-")
    assert resolve(given, "prefill").worker_id != found.worker_id
    decided = {"worker_id", "connector"}
    for field in dataclasses.fields(given):
        if field.name not in decided:
            assert getattr(found, field.name) == getattr(given, field.name)


def test_what_was_given_stays():
    found = resolve(options(worker_id="mine", kv_cache_layout="BHLNC"), "decode")
    assert (found.worker_id, found.kv_cache_layout) == ("mine", "BHLNC")


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options().device = "cpu"


@pytest.mark.parametrize("connector", ["loopback", DEFAULT_CONNECTORS])
def test_a_connector_that_the_user_named_is_remembered_as_named(connector):
    found = resolve(options(connector=connector), "decode")
    assert (found.connector, found.is_connector_named) == (connector, True)


def test_the_layout_is_left_to_the_worker_that_knows_its_groups(monkeypatch):
    monkeypatch.setenv(LAYOUT_VARIABLE, "BLNHC")
    assert resolve(options(), "decode").kv_cache_layout == "auto"


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
    ("kv_low_watermark", -0.1),
    ("kv_low_watermark", 1.0),
    ("kv_low_watermark", math.nan),
    ("kv_high_watermark", 1.1),
    ("kv_high_watermark", math.nan),
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
