"""Worker processes that join and leave under load: no prompt is lost, and each ends with code 0."""

import signal

import pytest
from support.null_host import Host

from kvxfer.serve.backend import BackendState


@pytest.fixture
def host(fork_server, tmp_path, leaves_nothing_behind):
    with Host(fork_server, tmp_path) as found:
        yield found


def churn(host, rounds, pause_s):
    """Each round: one of each role joins, one of each drains, prompts all the while."""
    host.start("prefill-0", "prefill-1", "decode-0", "decode-1")
    host.until_met()
    for turn in range(rounds):
        leaving = {name: host.router.drain(name) for name in (f"prefill-{turn}", f"decode-{turn}")}
        host.start(f"prefill-{turn + 2}", f"decode-{turn + 2}")
        while not all(one.is_drained for one in leaving.values()):
            host.submit()
            host.router.poll(pause_s)
            assert not any(one.state is BackendState.GONE for one in leaving.values())
        for name in leaving:
            assert host.ended(name) == 0
        host.until_met()
    for _ in range(20):
        host.submit()
    host.check_all()


def test_no_prompt_is_lost_while_processes_join_and_leave(host):
    churn(host, rounds=1, pause_s=0.01)


@pytest.mark.slow
def test_no_prompt_is_lost_while_many_join_and_leave(host):
    churn(host, rounds=12, pause_s=0.003)


def test_sigterm_drains_for_as_long_as_told_and_a_second_one_ends_it(host):
    host.start("prefill-0", "decode-0", "decode-1", shutdown_timeout_s=15.0)
    host.until_met()
    slow = [host.submit(max_new_tokens=40) for _ in range(8)]
    host.until(lambda: all(one.output for one in slow))
    host.processes["decode-0"].send(signal.SIGTERM)
    host.check_all()
    assert host.ended("decode-0") == 0
    last = host.submit(max_new_tokens=300)
    host.until(lambda: last.output)
    assert last.backend.name == "decode-1"
    host.processes["decode-1"].send(signal.SIGTERM)
    host.until(lambda: last.backend.state is BackendState.DRAINING)
    host.processes["decode-1"].send(signal.SIGTERM)
    host.until(lambda: last.finished is not None)
    assert host.ended("decode-1") == 0
    assert last.finished.reason == "error"
    assert f", after {len(last.output)} tokens" in last.finished.error
