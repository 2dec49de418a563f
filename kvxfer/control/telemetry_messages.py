"""Messages by which a router asks workers for their metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.control.cache_messages import WireStruct

MAX_METRICS_CHARS = 1 << 20
"""A worker with 1,000 peers tells about 200,000."""


class MetricsQuery(WireStruct, frozen=True):
    pass


class Metrics(WireStruct, frozen=True):
    """The answer, in Prometheus' text format (`kvxfer.telemetry.families` has the names)."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_METRICS_CHARS)]
