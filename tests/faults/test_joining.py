"""Worker processes that join and leave under load: no prompt is lost, and each ends with code 0."""

import signal
import time

import pytest
from support.null_process import SPEC
from support.null_runner import VOCAB_SIZE, Reference
from support.service_processes import Process, free_port

from kvxfer.serve.backend import BackendState
from kvxfer.serve.router import Router

OPTIONS = {"connector": "nixl", "lane": "push", "request_timeout_s": 20.0}


class Host:
    """Processes by name, and a router that tells them of one another. A context."""

    def __init__(self, server, directory):
        self._server, self._directory = server, directory
        self.router = Router(5.0, survives_loss=True, request_timeout_s=30.0)
        self.processes = {}
        self.sent = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.router.close()
        for process in self.processes.values():
            process.end()

    def start(self, *names, **options):
        """At once, all of them; the router dials them as they come up."""
        for name in names:
            role, listen = name.partition("-")[0], f"tcp://127.0.0.1:{free_port()}"
            told = OPTIONS | {"worker_id": name, "listen": listen} | options
            order = {"role": role, "namespaces": {}, "dial": [], "options": told}
            order["environment"] = {}
            self.processes[name] = Process(self._server, order, self._directory / f"{name}.log")
            self.processes[name].launch()
            self.router.add(listen, role)

    def submit(self, max_new_tokens=4):
        seed = len(self.sent)
        tokens = [(7 * seed + 13 * i) % VOCAB_SIZE for i in range(6 + seed % 20)]
        completion = self.router.submit(None, tokens, max_new_tokens, verify=True)
        self.sent.append((completion, max_new_tokens))
        return completion

    def until(self, condition, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.tails()
            self.router.poll(0.005)

    def tails(self):
        return "\n".join(f"{name}\n{one.tail()}" for name, one in self.processes.items())

    def until_met(self):
        names = [one.partition("-")[0] for one in self.processes]
        wanted = names.count("prefill")
        decodes = lambda: [one for one in self.router.backends if one.role == "decode"]  # noqa: E731
        self.until(
            lambda: (
                len(self.router.backends) == len(names)
                and [one.status.get("peers") for one in decodes()] == [wanted] * len(decodes())
            )
        )

    def check_all(self):
        self.until(lambda: all(one.finished is not None for one, _ in self.sent))
        for completion, max_new_tokens in self.sent:
            found = completion.finished
            assert (found.reason, found.error) == ("length", "")
            reference = Reference([SPEC], completion.tokens, max_new_tokens)
            assert (completion.output, found.kv_digests) == (reference.tokens, reference.digests)
        self.sent.clear()

    def ended(self, name):
        """Its exit code."""
        return self.processes.pop(name).wait()


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
