"""Worker processes without a model that come and go, and a router in the test's own process."""

import time

from support.null_process import SPEC
from support.null_runner import VOCAB_SIZE, Reference
from support.service_processes import Process, free_port

from kvxfer.control.messages import WIRE_VERSION
from kvxfer.serve.router import Router

OPTIONS = {"connector": "nixl", "lane": "push", "request_timeout_s": 20.0}


class Host:
    """Processes by name, and a router that tells them of one another. A context."""

    def __init__(self, server, directory):
        self._server, self.logs = server, directory
        self.router = Router(5.0, survives_loss=True, request_timeout_s=30.0)
        self.processes = {}
        self.addresses = {}
        self.sent = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.router.close()
        for process in self.processes.values():
            process.end()

    def start(self, *names, dial=(), wire_version=WIRE_VERSION, is_added=True, **options):
        """At once, all of them; the router dials those that are `added` as they come up. They dial
        the workers of the names `dial`, and speak a `wire_version`."""
        for name in names:
            role, listen = name.partition("-")[0], f"tcp://127.0.0.1:{free_port()}"
            listen = options.get("listen", listen)
            told = OPTIONS | {"worker_id": name, "listen": listen} | options
            order = {"role": role, "namespaces": {}, "environment": {}, "options": told}
            order["dial"] = [self.addresses[one] for one in dial]
            order["wire_version"] = wire_version
            self.processes[name] = Process(self._server, order, self.logs / f"{name}.log")
            self.processes[name].launch()
            self.addresses[name] = listen
            if is_added:
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
