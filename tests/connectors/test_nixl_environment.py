"""What NIXL is told through the environment: the user's word stands, and nothing is set unsaid."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from connectors import nixl_environment
from connectors.nixl_environment import (
    PROGRESS_THREAD,
    already_loaded,
    environment_plan,
    late_warning,
    network_hint,
    prepare_environment,
    progress_thread_setting,
    reads_from,
)
from kvxfer.errors import UsageError


def test_the_plan_names_all_that_is_set_and_keeps_the_users_values() -> None:
    environ = {"UCX_RMA_PPLN_ENABLE": "n", "UCX_TLS": "tcp"}
    plan = {setting.name: setting for setting in environment_plan(environ, has_rdma=False)}
    theirs = plan["UCX_RMA_PPLN_ENABLE"]
    assert (theirs.value, theirs.source, theirs.wanted) == ("n", "user", "y")
    others = [setting for setting in plan.values() if setting is not theirs]
    assert others and all(one.source == "kvxfer" and one.value == one.wanted for one in others)
    assert all(setting.reason for setting in plan.values())
    assert plan["UCX_MODULES"].value == "^ib"
    assert environ == {"UCX_RMA_PPLN_ENABLE": "n", "UCX_TLS": "tcp"}


def test_rdma_modules_are_left_out_only_where_there_is_no_rdma() -> None:
    with_rdma = {setting.name for setting in environment_plan({}, has_rdma=True)}
    without = {setting.name for setting in environment_plan({}, has_rdma=False)}
    assert without - with_rdma == {"UCX_MODULES"}
    assert with_rdma < without


def test_the_network_is_that_of_the_address_which_others_dial() -> None:
    """Unless the user named one, or there are RDMA devices, which would be left out by it."""
    interfaces = {"10.0.0.1": "eth0", "192.168.9.1": "eth1"}

    def devices(environ: dict[str, str], has_rdma: bool = False) -> tuple[str, str] | None:
        plan = environment_plan(environ, has_rdma, interfaces)
        return next(
            ((one.value, one.source) for one in plan if one.name == "UCX_NET_DEVICES"), None
        )

    told = {"KVXFER_DATA_ADDRESS": "192.168.9.1"}
    assert devices({}) is None
    assert devices(told) == ("eth1", "kvxfer")
    assert devices(told, has_rdma=True) is None
    assert devices({"KVXFER_DATA_ADDRESS": "203.0.113.9"}) is None, "not of this host: forwarded"
    assert devices({**told, "UCX_NET_DEVICES": "eth0"}) == ("eth0", "user")


def test_a_network_that_leads_nowhere_is_hinted_at() -> None:
    assert "UCX_NET_DEVICES of both (all here)" in network_hint({})
    assert "(eth0 here)" in network_hint({"UCX_NET_DEVICES": "eth0"})


@pytest.mark.parametrize(
    ("tls", "has_rdma", "expected"),
    [
        (None, False, {"host"}),
        ("all", True, {"host", "network"}),
        ("^cma", False, {"host"}),
        ("shm,tcp", False, {"host"}),
        ("tcp", False, set()),
        ("tcp, self,cuda_copy", True, set()),
    ],
)
def test_who_is_read_from_without_work_of_its_own(
    tls: str | None, has_rdma: bool, expected: set[str]
) -> None:
    assert reads_from({"UCX_TLS": tls} if tls else {}, has_rdma) == expected


@pytest.mark.parametrize(("cores", "value"), [(1, "0"), (7, "0"), (8, "1"), (128, "1")])
def test_the_progress_thread_needs_cores_to_spare(cores: int, value: str) -> None:
    setting = progress_thread_setting({}, cores)
    assert (setting.value, setting.source) == (value, "kvxfer")
    assert str(cores) in setting.reason
    for choice in ("0", "1"):
        chosen = progress_thread_setting({PROGRESS_THREAD: choice}, cores)
        assert (chosen.value, chosen.source, chosen.wanted) == (choice, "user", value)


def test_other_values_for_the_progress_thread_are_refused() -> None:
    with pytest.raises(UsageError, match=f"{PROGRESS_THREAD}: 'yes'"):
        progress_thread_setting({PROGRESS_THREAD: "yes"}, 8)


def test_what_is_loaded_already_is_noticed() -> None:
    assert already_loaded(["os", "numpy"], "/lib/libc.so.6\n") == ""
    assert "nixl_cu13" in already_loaded(["os", "nixl_cu13"], "")
    assert "UCX" in already_loaded([], "7f00 r-xp /x/libucp-1a2b.so.0.0.0\n")


def test_a_late_start_is_warned_of_in_one_line_naming_what_is_missed() -> None:
    plan = environment_plan({}, has_rdma=True)
    assert late_warning(plan, "") == ""
    assert late_warning([], "the module nixl") == ""
    text = late_warning(plan, "the module nixl")
    assert "\n" not in text
    assert "UCX_RMA_PPLN_ENABLE=y" in text


def test_preparing_sets_what_is_missing_and_warns_once_it_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for setting in environment_plan({}, has_rdma=False):
        monkeypatch.setenv(setting.name, setting.value)
    monkeypatch.delenv("UCX_RMA_PPLN_ENABLE")
    monkeypatch.setenv("UCX_TCP_KEEPCNT", "9")
    monkeypatch.setattr(nixl_environment, "already_loaded", lambda *_: "the module nixl")
    with caplog.at_level(logging.WARNING):
        prepare_environment()
        prepare_environment()
    assert os.environ["UCX_RMA_PPLN_ENABLE"] == "y"
    assert os.environ["UCX_TCP_KEEPCNT"] == "9"
    (record,) = caplog.records
    assert "UCX_RMA_PPLN_ENABLE=y" in record.message
    assert "KEEPCNT" not in record.message


@pytest.mark.slow
def test_nixl_imported_before_us_is_warned_of() -> None:
    """The real thing, in a process that embeds kvxfer after NIXL."""
    code = (
        "import json, logging, os; import nixl; from connectors.nixl_api import load_nixl; "
        "lines = []; handler = logging.Handler(); "
        "handler.emit = lambda record: lines.append(record.getMessage()); "
        "logging.getLogger('connectors.nixl_environment').addHandler(handler); "
        "load_nixl(); load_nixl(); print(json.dumps([lines, os.environ['UCX_RMA_PPLN_ENABLE']]))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.returncode == 0, done.stderr
    lines, value = json.loads(done.stdout)
    assert value == "y"
    (line,) = lines
    assert line.startswith("the module nixl was loaded before kvxfer")


def test_a_cut_link_is_noticed_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX's own defaults never notice one; these are set before the first agent is made."""
    names = ("UCX_TCP_USER_TIMEOUT", "UCX_TCP_KEEPIDLE", "UCX_TCP_KEEPINTVL", "UCX_TCP_KEEPCNT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is set below goes when the test ends
        monkeypatch.delenv(name)
    prepare_environment()
    user, idle, interval = (float(os.environ[name].removesuffix("s")) for name in names[:3])
    assert 2 < user <= 10, "a blip of 1.5 s is survived"
    assert idle + interval * int(os.environ[names[3]]) <= 10
    loads = "import connectors.nixl_api as api, os; api.load_nixl(); "
    tells = f"print([os.environ.get(name) for name in {names}])"
    environ = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", loads + tells],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str([os.environ[name] for name in names]), done.stderr
