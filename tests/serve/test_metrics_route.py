"""GET /metrics: the router's metrics and its workers', over HTTP."""

import dataclasses
import threading

import pytest
from support.exposition import read, value
from support.http_service import MODEL, HttpService, served_model

from kvxfer.serve import metrics_route as module
from kvxfer.serve.metrics_route import merge, metrics_route
from kvxfer.serve.scrapes import Scrape, Scrapes
from kvxfer.telemetry.families import FAMILIES
from kvxfer.telemetry.request_metrics import RequestMetrics

SIDES = {"prefill": "prefill-0", "decode": "decode-0"}


class Service(HttpService):
    """With /metrics."""

    def __enter__(self):
        self.metrics = RequestMetrics()
        self._routes = self._more["routes"] = []
        super().__enter__()
        return self
