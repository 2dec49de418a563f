"""The cpu overlay as it would run: the processes of its pods, with exactly its arguments, variables
and files, as its user, on two nodes that network policies stand between."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from support.manifests import KUBERNETES, Document, pod_templates, rendered
from support.namespaces import skip_unless_permitted
from support.pod_processes import (
    ask,
    check_probes,
    command_in,
    enforce,
    running_pod,
    wait_ready,
    why_not,
)
from support.pods import Pod, make_pod

from kvxfer.bench.netns import ADDRESSES, DEVICE, Namespaces
from kvxfer.control.auth import make_key_pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("leaves_nothing_behind"),
]
SIDES = {"router": "left", "prefill": "left", "decode": "right"}
MOVED = "10.213.1.2"
ROUTER = "http://127.0.0.1:8000"
PROMPT = {"model": "kvxfer", "prompt": "To be, or not to be", "max_tokens": 8, "temperature": 0}
ALL_WELL = {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 200}


class Cluster:
    """Documents, pods and addresses; `pod` makes one anew."""

    def __init__(self, documents: list[Document], root: Path, namespaces: Namespaces) -> None:
        self.templates = {one.role: one for one in pod_templates(documents)}
        self.documents = documents
        self.namespaces = namespaces
        self.root = root
        self.hosts = root / "hosts"
        self.addresses = {role: ADDRESSES[side] for role, side in SIDES.items()}
        self.volumes = {
            ("ConfigMap", d["metadata"]["name"]): d["data"] for d in documents if "data" in d
        } | secrets(root / "keys")
        self.name_hosts()

    def name_hosts(self) -> None:
        """What the cluster's DNS would say; in place, since pods see this file."""
        lines = [
            f"{self.addresses[role]} kvxfer-{role}-0.kvxfer-{role}"
            for role in ("prefill", "decode")
        ]
        self.hosts.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")

    def pod(self, role: str, life: str = "") -> tuple[Pod, str, Namespaces, Path]:
        template, name = self.templates[role], f"kvxfer-{role}-0"
        root = self.root / f"{name}{life}"
        made = make_pod(template, name, self.addresses[role], root, self.volumes)
        return made, SIDES[role], self.namespaces, self.hosts

    def enforce(self) -> None:
        policies = {
            one["metadata"]["name"].removeprefix("kvxfer-"): one
            for one in self.documents
            if one["kind"] == "NetworkPolicy"
        }
        for side in ("left", "right"):
            roles = [role for role, where in SIDES.items() if where == side]
            chosen = [policies[role] for role in roles], [self.templates[role] for role in roles]
            enforce(self.namespaces, side, *chosen)


def secrets(directory: Path) -> dict[tuple[str, str], dict[str, str]]:
    names = ("kvxfer-router", "kvxfer-prefill-0", "kvxfer-decode-0")
    pairs = [make_key_pair(directory, name) for name in names]
    found = {("Secret", "kvxfer-peers"): {public.name: public.read_text() for _, public in pairs}}
    owners = ("router-key", "prefill-keys", "decode-keys")
    for owner, (secret, _) in zip(owners, pairs, strict=True):
        found["Secret", f"kvxfer-{owner}"] = {secret.name: secret.read_text()}
    return found


@pytest.fixture
def root() -> Iterator[Path]:
    """Which another user may enter, with a path that is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="kvxfer-pods-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def cluster(root: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    skip_unless_permitted()
    if reason := why_not():
        pytest.skip(reason)
    directory = root / "overlay"
    directory.mkdir()
    used: dict[str, list[str]] = {"resources": ["overlays/cpu"], **request.param}
    told = {
        kind: [
            str(Path("..", *[".."] * (len(root.parts) - 1), *(KUBERNETES / one).parts[1:]))
            for one in names
        ]
        for kind, names in used.items()
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(told))
    documents = rendered(directory)
    with Namespaces() as namespaces:
        yield Cluster(documents, root, namespaces)


def completion(cluster: Cluster) -> str:
    status, text = ask(cluster.namespaces, "left", f"{ROUTER}/v1/completions", PROMPT)
    assert status == 200, text
    answer: str = yaml.safe_load(text)["choices"][0]["text"]
    return answer


@pytest.mark.parametrize("cluster", [{}], indirect=True)
def test_pods_serve_find_each_other_again_and_drain(cluster: Cluster) -> None:
    cluster.enforce()
    with ExitStack() as stack:
        pods = {role: stack.enter_context(running_pod(*cluster.pod(role))) for role in SIDES}
        wait_ready(cluster.namespaces, f"{ROUTER}/ready", list(pods.values()))
        for role, side in SIDES.items():
            template, address = cluster.templates[role], cluster.addresses[role]
            assert check_probes(cluster.namespaces, template, address, side) == ALL_WELL
        before = completion(cluster)
        assert ask(cluster.namespaces, "left", f"{ROUTER}/health")[0] == 200
        assert "lane: nixl/push" in pods["decode"].text
        # What no policy names is not reached from the other node.
        url = f"http://{ADDRESSES['right']}:9101/metrics"
        assert ask(cluster.namespaces, "left", url)[0] == 0

        assert pods["decode"].terminate(30) == 0, pods["decode"].text
        assert "takes nothing new" in pods["decode"].text
        assert ask(cluster.namespaces, "left", f"{ROUTER}/ready")[0] == 503
        # The pod comes back under its name, at another address.
        command_in(cluster.namespaces, "right", *f"ip address add {MOVED}/32 dev {DEVICE}".split())
        command_in(cluster.namespaces, "left", *f"ip route add {MOVED} dev {DEVICE}".split())
        cluster.addresses["decode"] = MOVED
        cluster.name_hosts()
        again = stack.enter_context(running_pod(*cluster.pod("decode", "-again")))
        wait_ready(cluster.namespaces, f"{ROUTER}/ready", [again, pods["router"]])
        assert completion(cluster) == before
        for running in (again, pods["prefill"], pods["router"]):
            assert running.terminate(30) == 0, running.text
            assert "Traceback" not in running.text


@pytest.mark.parametrize("cluster", [{"components": ["components/peer-lane"]}], indirect=True)
def test_pods_of_a_node_share_nothing_but_a_directory_and_use_peer(cluster: Cluster) -> None:
    with ExitStack() as stack:
        pods = {role: stack.enter_context(running_pod(*cluster.pod(role))) for role in SIDES}
        wait_ready(cluster.namespaces, f"{ROUTER}/ready", list(pods.values()))
        assert completion(cluster)
        assert "lane: peer/pull" in pods["decode"].text
        for running in pods.values():
            assert running.terminate(30) == 0, running.text
