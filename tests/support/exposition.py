"""Prometheus' text format, read by its own parser."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""


def read(text: str) -> dict[str, Mapping[Series, float]]:
    """Each family's samples, by its name as in the text; no family and no series is there twice."""
    found: dict[str, Mapping[Series, float]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        assert name not in found, f"{name} is there twice"
        samples = {(s.name, frozenset(s.labels.items())): s.value for s in family.samples}
        assert len(samples) == len(family.samples), f"{name} has a series twice"
        found[name] = samples
    return found


def value(text: str, name: str, **labels: str) -> float:
    """Of one sample. KeyError where there is none."""
    known = {series: v for samples in read(text).values() for series, v in samples.items()}
    return known[name, frozenset(labels.items())]
