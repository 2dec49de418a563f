"""Numbers on their way to Prometheus: plain counts in whichever thread owns them, and text when
somebody asks.

No global registry: whoever tells of itself gathers Samples and has them written once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvxfer.telemetry.families import FAMILIES, Family

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of what `Samples.text` writes."""
LONGEST_LABEL = 200
"""Characters of a label's value."""


class Tally:
    """A histogram's counts. Not thread-safe: its owner observes and reads."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket alone; the last has no upper bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, number of values up to it), the last for all of them."""
        found, below = [], 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            below += count
            found.append(("+Inf" if bound is None else repr(float(bound)), below))
        return found


class Samples(Collector):
    """What one look found. Each series counts once: what comes again is left out."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def add(self, name: str, value: float, **labels: str) -> None:
        """A sample of the counter or gauge `name`."""
        family = FAMILIES[name]
        assert set(labels) == set(family.labels), f"{name}: {sorted(labels)}"
        self._put(family, family.name, labels, value)

    def add_tally(self, name: str, tally: Tally, **labels: str) -> None:
        """All of the histogram `name`."""
        family = FAMILIES[name]
        assert set(labels) == set(family.labels), f"{name}: {sorted(labels)}"
        rows = tally.cumulative()
        for bound, count in rows:
            self._put(family, f"{name}_bucket", {**labels, "le": bound}, count)
        self._put(family, f"{name}_count", labels, rows[-1][1])
        self._put(family, f"{name}_sum", labels, tally.sum)

    def add_text(self, text: str, **labels: str) -> int:
        """The samples of another process's `text`, each with `labels` too, which stand above its
        own of these names. What is no sample of a metric that we know is left out: returns how many
        were. Raises ValueError for what is no exposition; then nothing was added."""
        try:
            families = list(text_string_to_metric_families(text))
        except (LookupError, TypeError) as error:  # its parser trusts whoever wrote the text
            raise ValueError(f"no exposition: {error}") from error
        strange = 0
        for found in families:
            family = FAMILIES.get(found.name) or FAMILIES.get(f"{found.name}_total")
            for sample in found.samples:
                if family is None or not _belongs(family, sample.name, sample.labels):
                    strange += 1
                else:
                    self._put(family, sample.name, {**sample.labels, **labels}, sample.value)
        return strange

    def _put(self, family: Family, name: str, labels: Mapping[str, str], value: float) -> None:
        short = {key: text[:LONGEST_LABEL] for key, text in labels.items()}
        series = name, tuple(sorted(short.items()))
        if series in self._seen:
            return
        self._seen.add(series)
        metric = self._metrics.get(family.name)
        if metric is None:
            metric = self._metrics[family.name] = Metric(family.base, family.help, family.kind)
        metric.add_sample(name, short, value)

    def collect(self) -> Iterable[Metric]:
        return self._metrics.values()

    def text(self) -> str:
        """All of it in Prometheus' text format, each family once."""
        return generate_latest(self).decode()


def _belongs(family: Family, name: str, labels: Mapping[str, str]) -> bool:
    """Whether a sample of this name, with these labels, is one of `family`."""
    own = set(labels)
    if family.kind != "histogram":
        return name == family.name and own == set(family.labels)
    if name == f"{family.name}_bucket":
        return own == {*family.labels, "le"}
    return name in (f"{family.name}_count", f"{family.name}_sum") and own == set(family.labels)
