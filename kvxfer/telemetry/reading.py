"""Somebody else's metrics, read."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families


def totals(text: str) -> dict[str, float]:
    """The sum of each name's samples, whatever their labels, in Prometheus' text format. Buckets of
    histograms are left out. Raises ValueError for what is no such text."""
    found: defaultdict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    found[sample.name] += sample.value
    except (LookupError, TypeError) as error:  # the parser trusts whoever wrote the text
        raise ValueError(f"no exposition: {error}") from error
    return dict(found)
