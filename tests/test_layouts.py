"""The layouts of a worker's groups: flag, variable, connector and backend, as a worker has them."""

from pathlib import Path

import pytest

from connectors.loopback import LoopbackConnector
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.config import LAYOUT_VARIABLE, WorkerOptions, resolve
from kvxfer.errors import UsageError
from kvxfer.worker import layouts
from kvxfer.worker.layouts import resolve_layouts

FULL = KVCacheSpec(2, 2, 8, 8, "float32", 4)
SLIDING = KVCacheSpec(3, 1, 8, 4, "bfloat16", 4, GroupKind.SLIDING, 5)


class Choosy(LoopbackConnector):
    preferred_layout = "BHLNC"


class ChoosyByKind(LoopbackConnector):
    preferred_layout = "sliding=BLNHC"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(LAYOUT_VARIABLE, raising=False)


def found(connector_type=LoopbackConnector, connector="auto", specs=(FULL, SLIDING), **given):
    options = resolve(WorkerOptions(model=Path("m"), connector=connector, **given), "decode")
    return [layout.value for layout in resolve_layouts(options, specs, {connector: connector_type})]


def test_nobody_wants_anything():
    assert found() == ["LBNHC", "LBNHC"]


def test_the_variable_counts_and_the_flag_counts_more(monkeypatch):
    monkeypatch.setenv(LAYOUT_VARIABLE, "BLNHC")
    assert found() == ["BLNHC", "BLNHC"]
    assert found(kv_cache_layout="LHBNC") == ["LHBNC", "LHBNC"]
    monkeypatch.delenv(LAYOUT_VARIABLE)
    assert found(kv_cache_layout="sliding=LHBNC") == ["LBNHC", "LHBNC"]


def test_a_flag_by_kind_hides_the_whole_variable(monkeypatch):
    """The user's word is one rank, not two."""
    monkeypatch.setenv(LAYOUT_VARIABLE, "BLNHC")
    assert found(kv_cache_layout="sliding=LHBNC") == ["LBNHC", "LHBNC"]


def test_a_connector_is_heard_only_if_the_user_named_it(monkeypatch):
    assert found(Choosy) == ["LBNHC", "LBNHC"]
    assert found(Choosy, "loopback") == ["BHLNC", "BHLNC"]
    assert found(ChoosyByKind, "loopback") == ["LBNHC", "BLNHC"]
    assert found(Choosy, "loopback", kv_cache_layout="full=LHBNC") == ["LHBNC", "BHLNC"]
    monkeypatch.setenv(LAYOUT_VARIABLE, "BLHNC")
    assert found(Choosy, "loopback") == ["BLHNC", "BLHNC"]


def test_a_backend_that_needs_one_is_above_the_user_and_says_so(monkeypatch):
    monkeypatch.setattr(layouts, "REQUIRED_LAYOUT", "sliding=BLHNC")
    assert found(Choosy, "loopback") == ["BHLNC", "BLHNC"]
    with pytest.raises(UsageError, match=r"--kv-cache-layout.*attention backend.*BLHNC.*sliding"):
        found(kv_cache_layout="LHBNC")
    monkeypatch.setenv(LAYOUT_VARIABLE, "LHBNC")
    with pytest.raises(UsageError, match=rf"{LAYOUT_VARIABLE}.*attention backend"):
        found()
    assert found(kv_cache_layout_override="LBHNC") == ["LBHNC", "LBHNC"]


def test_nonsense_from_either_source_is_refused(monkeypatch):
    for text in ("XX", "half=LBNHC", "cross=LBNHC"):
        with pytest.raises(UsageError, match="kv_cache_layout"):
            found(kv_cache_layout=text)
        monkeypatch.setenv(LAYOUT_VARIABLE, text)
        with pytest.raises(UsageError, match="kv_cache_layout"):
            found()
        monkeypatch.delenv(LAYOUT_VARIABLE)


def test_each_choice_is_logged_once_with_its_reason(caplog):
    with caplog.at_level("INFO", logger=layouts.__name__):
        found(Choosy, "loopback", kv_cache_layout="full=LHBNC")
    first, second = [record.message for record in caplog.records]
    assert "2 full layers" in first and "LHBNC" in first and "--kv-cache-layout" in first
    assert "3 sliding layers" in second and "window of 5" in second
    assert "BHLNC" in second and "preferred by the loopback connector" in second
