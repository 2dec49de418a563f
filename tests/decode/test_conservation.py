"""When the last request has gone, a worker looks whether every block is accounted for."""

import logging

import pytest


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_nothing_is_said_where_nothing_leaks(cluster, caplog, lane):
    _, decode = cluster.pair(lane)
    cluster.connect_router(decode)
    with caplog.at_level(logging.ERROR):
        cluster.finish(cluster.send(decode, 11))
        cluster.until_idle()
    assert not caplog.records


def test_a_block_that_nobody_holds_a_request_for_is_told(cluster, caplog):
    _, decode = cluster.pair("push")
    cluster.connect_router(decode)
    stray = decode.pools.allocate([1])
    with caplog.at_level(logging.ERROR):
        cluster.finish(cluster.send(decode, 11))
        cluster.until(lambda: bool(caplog.records))
    assert "held for no request" in caplog.text
    decode.pools.free(stray)
