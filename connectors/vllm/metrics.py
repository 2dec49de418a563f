"""What vLLM logs and Prometheus is told of transfers, in the shape of its vllm:nixl_* metrics."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connectors.vllm.stats import BYTES, DESCRIPTORS, DURATION, FAILED, KEYS, new_data

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
SIZES = tuple(2.0**exponent for exponent in range(11, 35, 2))
COUNTS = (10, 30, 100, 300, 1000, 3000, 10000, 30000)
_HISTOGRAMS = {
    DURATION: ("xfer_time_seconds", "Seconds that a KV transfer took.", SECONDS),
    BYTES: ("bytes_transferred", "Bytes that a KV transfer moved.", SIZES),
    DESCRIPTORS: ("num_descriptors", "Stretches of bytes that a KV transfer moved.", COUNTS),
}


class KvxferStats(KVConnectorStats):
    """`data`: as `stats.Stats.take` returns it."""

    def reset(self) -> None:
        self.data = new_data()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key in KEYS:
            self.data[key].extend(other.data[key])
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        seconds, sizes = self.data[DURATION], self.data[BYTES]
        found: dict[str, int | float] = {
            "Num successful transfers": len(seconds),
            "Num failed transfers": len(self.data[FAILED]),
        }
        if seconds:
            found["Avg xfer time (ms)"] = round(fmean(seconds) * 1e3, 3)
            found["Avg MB per transfer"] = round(fmean(sizes) / 2**20, 3)
            found["Throughput (MB/s)"] = round(sum(sizes) / 2**20 / max(sum(seconds), 1e-9), 3)
            found["Avg number of descriptors"] = round(fmean(self.data[DESCRIPTORS]), 1)
        return found


class KvxferPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: self._by_engine(
                metric_types[Histogram](
                    name=f"vllm:kvxfer_{name}",
                    documentation=text,
                    buckets=buckets,
                    labelnames=labelnames,
                )
            )
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._failed = self._by_engine(
            metric_types[Counter](
                name="vllm:kvxfer_num_failed_transfers",
                documentation="KV transfers whose bytes were not used.",
                labelnames=labelnames,
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, histograms in self._histograms.items():
            for value in transfer_stats_data[key]:
                histograms[engine_idx].observe(value)
        self._failed[engine_idx].inc(len(transfer_stats_data[FAILED]))

    def _by_engine(self, metric: Any) -> dict[int, Any]:
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }
