"""What deploy/ ships, read as those read it that it is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from support.commands import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
"""The only form of interpolation that the compose file uses."""


def compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """The compose file, with its variables filled in as compose does, and merges resolved."""
    text = _VARIABLE.sub(lambda m: environment.get(m[1], "") or m[2], COMPOSE.read_text())
    assert "${" not in text, "a form of interpolation that compose() does not know"
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def prometheus_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    return found


def alerts() -> list[dict[str, Any]]:
    text = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
