"""`kvxfer bench hosts`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import KVXFER, run
from support.namespaces import skip_unless_permitted

from kvxfer.bench.hosts import HostsOptions, run_hosts
from kvxfer.errors import UsageError


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mtu", HostsOptions(mtu=(1500, 68))),
        ("requests", HostsOptions(requests=1)),
        ("prompt_tokens", HostsOptions(prompt_tokens=0)),
        ("loss", HostsOptions(loss=-1)),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(name: str, options: HostsOptions) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        run_hosts(options)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("leaves_nothing_behind")
def test_prompts_are_right_and_figures_are_kept(tmp_path: Path) -> None:
    skip_unless_permitted()
    kept = tmp_path / "hosts.json"
    wanted = ("--mtu", "9000", "--requests", "5", "--prompt-tokens", "800", "--json", str(kept))
    done = run(*KVXFER, "bench", "hosts", *wanted, timeout_s=200)
    assert done.code == 0, done
    figures = {one["metric"]: one for one in json.loads(kept.read_text())}
    assert figures["MTU 9000: prompts whose KV or tokens differ"]["value"] == 0
    assert figures["MTU 9000: prompts"]["value"] > 0
    assert figures["MTU 9000, 3 % lost: KV of a prompt under way"]["runs"] == 5
