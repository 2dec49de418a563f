"""The shipped Grafana dashboard: its queries, as Grafana would send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from support.shipped import DEPLOY

PATH = DEPLOY / "grafana" / "kvxfer.json"
BUILT_IN = {"__rate_interval", "__all"}
"""What Grafana itself gives a value."""
_USED = re.compile(r"\$\{?(\w+)\}?")


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def variables(dashboard: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {one["name"]: one for one in dashboard["templating"]["list"]}


def used_variables(dashboard: Mapping[str, Any]) -> set[str]:
    """Wherever they stand: in queries, titles, data sources, or as what a panel repeats by."""
    text = json.dumps(dashboard["panels"]) + json.dumps(dashboard["templating"])
    repeated = {panel["repeat"] for panel in dashboard["panels"] if "repeat" in panel}
    return set(_USED.findall(text)) | repeated


def queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel's title, expression with its variables), of every panel."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def filled_in(expression: str, worker: str, interval: str) -> str:
    """As sent for a chosen worker, or a regular expression of several."""
    return expression.replace("$__rate_interval", interval).replace("$worker", worker)
