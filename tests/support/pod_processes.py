"""Pods that run: each a process with PID 1 of its own, as a user without rights, who may write to
the pod's /tmp and nowhere else, on one of two "nodes", between which policies decide what passes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from support.commands import ROOT
from support.manifests import Document, PodTemplate
from support.pods import USER, Pod
from support.running import wait_until

from kvxfer.bench.netns import DEVICE, Namespaces

_SET_UP = """
mount --bind "$1" /etc/hosts
mount --bind "$2" "$2"
mount --bind "$5" "$5"
if [ -n "$3" ]; then
    mkdir "$2/python"
    mount --bind "$4" "$2/python"
    mount -t tmpfs -o mode=755 tmpfs "$3"
    mkdir -p "$4"
    mount --move "$2/python" "$4"
fi
mount -o remount,bind,ro /
shift 5
exec env -i "$@"
"""
START_TIMEOUT_S = 200
"""Of three that import torch at once, on a machine with other things to do."""
AS_USER = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"),
    *("--bounding-set=-all", "--inh-caps=-all"),
)
_ASK = """
import sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
try:
    with urllib.request.urlopen(asked, timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print(0, error)
"""


class RunningPod:
    """Started; `wait_for` reads its log."""

    def __init__(self, pod: Pod, side: str, namespaces: Namespaces, hosts: Path) -> None:
        self.pod = pod
        self.log = pod.root / "log"
        pod.node.mkdir(exist_ok=True)
        environment = {
            **pod.environment,
            "KVXFER_TEST_RUN": os.environ["KVXFER_TEST_RUN"],  # so that it is missed if it stays
            "TMPDIR": str(pod.tmp),  # stands for /tmp, where the repository may be
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": os.environ["PATH"],
        }
        command = [
            *namespaces.entering(side),
            *("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"),
            *("--", "sh", "-ec", _SET_UP, "pod", str(hosts), str(pod.tmp), *closed_python()),
            str(pod.node),
            *(f"{name}={value}" for name, value in environment.items()),
            *(*AS_USER, sys.executable, "-m", "kvxfer.cli", *pod.arguments),
        ]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self, timeout_s: float) -> int:
        """SIGTERM to PID 1 of the pod, as kubelet sends it; its exit code."""
        (first,) = psutil.Process(self._process.pid).children()
        first.terminate()
        return self._process.wait(timeout_s)

    def end(self) -> None:
        """However it is. PID 1 takes all of the pod along; it became another user, so the kernel
        does not kill it with unshare."""
        if self._process.poll() is None:
            for one in psutil.Process(self._process.pid).children():
                one.kill()
            self._process.kill()
            self._process.wait(10)


def why_not() -> str:
    """Why no pod can run here, or ''."""
    missing = [tool for tool in ("nft", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (nftables, util-linux)"
    return ""


def closed_python() -> tuple[str, str]:
    """The directory of this Python that other users may not enter, such as /root, and where it is
    installed in there: pods see that of it, and nothing else. Empty where they may."""
    home = Path(sys.base_prefix)
    closed = [one for one in reversed(home.parents) if not one.stat().st_mode & 0o001]
    return (str(closed[0]), str(home)) if closed else ("", "")


@contextmanager
def running_pod(*arguments: Any) -> Iterator[RunningPod]:
    running = RunningPod(*arguments)
    try:
        yield running
    finally:
        running.end()


def ask(namespaces: Namespaces, side: str, url: str, body: object = None) -> tuple[int, str]:
    """Status and text; 0 where nobody answers."""
    text = json.dumps(body) if body is not None else ""
    done = subprocess.run(
        [*namespaces.entering(side), sys.executable, "-c", _ASK, url, text],
        capture_output=True,
        text=True,
        timeout=60,
    )
    status, _, told = done.stdout.partition(" ")
    return int(status), told.strip()


def wait_ready(namespaces: Namespaces, url: str, pods: Sequence[RunningPod]) -> None:
    """Until a router says so."""

    def is_ready() -> bool:
        time.sleep(0.3)
        assert not any(one.has_ended for one in pods)
        return ask(namespaces, "left", url)[0] == 200

    try:
        wait_until(is_ready, START_TIMEOUT_S, "the router to be ready")
    except AssertionError as error:
        raise AssertionError("\n".join(one.text[-2000:] for one in pods)) from error


def check_probes(
    namespaces: Namespaces, template: PodTemplate, address: str, side: str
) -> dict[str, int]:
    """What each probe of the pod is answered, as kubelet would ask on its node."""
    ports = {one["name"]: one["containerPort"] for one in template.container["ports"]}
    found = {}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        told = template.container[probe]["httpGet"]
        url = f"http://{address}:{ports[told['port']]}{told['path']}"
        found[probe] = ask(namespaces, side, url)[0]
    return found


def enforce(namespaces: Namespaces, side: str, policies: Sequence[Document], pods: Any) -> None:
    """Let into `side` what any of the policies lets in, by port, and nothing else."""
    rules = []
    for policy, template in zip(policies, pods, strict=True):
        named = {one["name"]: one["containerPort"] for one in template.container["ports"]}
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                first = named.get(port["port"], port["port"])
                rules.append(f"tcp dport {first}-{port.get('endPort', first)} accept")
    text = "\n".join(
        [
            "type filter hook input priority 0; policy drop",
            f'iifname != "{DEVICE}" accept',
            "ct state established,related accept",
            *rules,
        ]
    )
    command_in(namespaces, side, "nft", f"table inet pods {{\nchain input {{\n{text}\n}}\n}}")


def command_in(namespaces: Namespaces, side: str, *command: str) -> None:
    done = subprocess.run(
        [*namespaces.entering(side), *command], capture_output=True, text=True, timeout=10
    )
    assert done.returncode == 0, done.stderr
