"""Builds of two wire versions side by side, and workers that are not there: each is told of by name
and in vain, and the others serve on."""

import re
from contextlib import closing

import pytest
from support.null_host import Host

from kvxfer.control.messages import WIRE_VERSION
from kvxfer.errors import HandshakeRejected
from kvxfer.serve import fleet
from kvxfer.serve.router import Router

OLD = WIRE_VERSION - 1


def differs(ours, theirs):
    """A pattern of what one side says of the other."""
    return rf"wire_version differs: ours '?{ours}'?, theirs '?{theirs}'?"


NEW_OF_OLD, OLD_OF_NEW = differs(WIRE_VERSION, OLD), differs(OLD, WIRE_VERSION)


@pytest.fixture
def host(fork_server, tmp_path, leaves_nothing_behind):
    with Host(fork_server, tmp_path) as found:
        yield found


def log(host, name):
    path = host.logs / f"{name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def serves(host, count=4):
    for _ in range(count):
        host.submit()
    host.check_all()


def says(host, name, pattern):
    """How often the log of a worker does."""
    return len(re.findall(pattern, log(host, name)))


def test_of_two_versions_workers_are_refused_by_name_and_the_others_serve(host, monkeypatch):
    """Whoever dials: an old prefill worker and a new one, a decode worker of each, an old router
    and then a new one."""
    host.start("prefill-0", is_added=False)
    host.start("prefill-old", wire_version=OLD, is_added=False)
    host.start("decode-0", dial=("prefill-old", "prefill-0"), is_added=False)
    host.start("decode-old", dial=("prefill-0",), wire_version=OLD, is_added=False)
    with monkeypatch.context() as patched, closing(Router()) as old:
        patched.setattr(fleet, "WIRE_VERSION", OLD)
        with pytest.raises(HandshakeRejected, match=OLD_OF_NEW):
            old.connect([host.addresses["prefill-0"]], 20.0)
    host.router.connect([host.addresses["decode-0"]], 20.0)
    host.until(lambda: says(host, "prefill-old", "refused") and says(host, "decode-0", NEW_OF_OLD))
    serves(host)
    assert host.ended("decode-old") == 1
    last = log(host, "decode-old").strip().splitlines()[-1]
    assert re.fullmatch(f"decode: error: peer refused: {OLD_OF_NEW}", last), last
    assert says(host, "prefill-0", f"refused in:.*{NEW_OF_OLD}") == 2
    assert says(host, "prefill-old", f"refused in:.*{OLD_OF_NEW}") >= 1
    assert says(host, "decode-0", NEW_OF_OLD) == 1
    serves(host)
    assert all(process.is_alive() for process in host.processes.values())


def test_a_router_leaves_workers_of_another_version_alone_and_serves_with_the_others(host, caplog):
    host.start("prefill-0", "decode-0")
    old = ("decode-old", "prefill-old")
    host.start(*old, wire_version=OLD)
    host.until(lambda: len(host.router.backends) == 2)
    for name in old:
        told = re.escape(host.addresses[name]) + f": .*{NEW_OF_OLD}; it is left alone"
        assert len(re.findall(told, caplog.text)) == 1
        assert says(host, name, f"refused in:.*{OLD_OF_NEW}") >= 1
    serves(host)


@pytest.mark.slow
def test_a_worker_that_is_not_there_is_told_of_once_and_met_when_it_comes(host):
    """Neither decode nor router waits for it; the others serve meanwhile."""
    host.start("prefill-0")
    host.start("prefill-late")
    late = host.addresses["prefill-late"]
    host.processes["prefill-late"].end()
    host.start("decode-0", dial=("prefill-late", "prefill-0"))
    host.until(lambda: any(one.status.get("peers") for one in host.router.backends))
    serves(host)
    assert log(host, "decode-0").count(late) == 1
    host.processes["prefill-late"].launch()
    host.until_met()
    serves(host)
    assert log(host, "decode-0").count(f"dialling {late}") == 1
