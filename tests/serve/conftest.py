"""Clusters that leave nothing behind, and a front that does not either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fixtures import cluster, losing
from support.http_service import LIMITS, HttpService
from support.running import wait_until

__all__ = ["cluster", "losing"]


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpService]:
    with HttpService(LIMITS) as service:
        yield service


@pytest.fixture
def service(shared: HttpService) -> Iterator[HttpService]:
    yield shared
    shared.release()
    shared.until_idle()
    wait_until(lambda: shared.num_connections() == 0, 10, "connections")
