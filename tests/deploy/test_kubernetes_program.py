"""The program and the pods of deploy/kubernetes: it takes what they give it, and their keys."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.commands import KVXFER, run
from support.manifests import (
    EVERY,
    KUBERNETES,
    Document,
    PodTemplate,
    documents_of,
    kustomize,
    plain_base,
    pod_templates,
    rendered,
    schema_problems,
)
from support.pods import USER, Pod, make_pod, put_files

from decode.__main__ import decode
from kvxfer.cli import router
from kvxfer.command import Settings, parse
from kvxfer.config import WorkerOptions, resolve
from kvxfer.control.auth import Keys, make_key_pair
from kvxfer.control.channel import check_dial
from kvxfer.errors import UsageError
from kvxfer.serve.options import RouterOptions, check_router
from prefill.__main__ import prefill

COMMANDS = {"prefill": prefill, "decode": decode, "router": router}
GRACE_S = 20
"""A pod's end, beside what it waits for: threads, sockets, the last words."""


@pytest.fixture(params=EVERY)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return documents_of(request.param)


@pytest.fixture(autouse=True)
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose keys are root's, as kubelet makes them, where that can be had."""
    if os.getuid() == 0:
        monkeypatch.setattr("kvxfer.control.auth.os.geteuid", lambda: USER)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, str]]:
    """Secrets as keys.sh lays them out, for as many workers as any manifest has."""
    directory = tmp_path_factory.mktemp("keys")
    names = [f"kvxfer-{role}-{index}" for role in ("prefill", "decode") for index in range(2)]
    made = [make_key_pair(directory, name) for name in ("kvxfer-router", *names)]
    found: dict[tuple[str, str], dict[str, str]] = {("Secret", "kvxfer-peers"): {}}
    for secret, public in made:
        found["Secret", "kvxfer-peers"][public.name] = public.read_text()
        role = secret.name.split("-")[1].removesuffix(".key")
        of = f"kvxfer-{role}-key" + "s" * (role != "router")
        found.setdefault(("Secret", of), {})[secret.name] = secret.read_text()
    return found


def pods_of(
    documents: list[Document], keys: Mapping[tuple[str, str], Mapping[str, str]], root: Path
) -> list[tuple[PodTemplate, Pod]]:
    volumes = {
        **keys,
        **{("ConfigMap", d["metadata"]["name"]): d["data"] for d in documents if "data" in d},
    }
    return [
        (template, make_pod(template, name, "10.1.2.3", root / name, volumes))
        for template in pod_templates(documents)
        for name in template.pod_names or [f"{template.owner['metadata']['name']}-6bcf-x2x"]
    ]


# --- the program ----------------------------------------------------------------------------------


def parsed(pod: Pod) -> Mapping[str, object]:
    assert pod.arguments[0] == pod.role
    settings = Settings(pod.role, environment=pod.environment)
    return parse(COMMANDS[pod.role], pod.arguments[1:], settings)


def test_the_program_takes_every_argument_variable_and_key(
    documents: list[Document], keys: dict[tuple[str, str], dict[str, str]], tmp_path: Path
) -> None:
    """Also its addresses and keys, and the time that it may take to end."""
    dialled: list[str] = []
    listening: list[str] = []
    for template, pod in pods_of(documents, keys, tmp_path):
        options = parsed(pod)["options"]
        waits_s = options.shutdown_timeout_s
        if isinstance(options, RouterOptions):
            check_router(options)
            dialled += [*options.prefill, *options.decode]
            waits_s += template.container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert template.container["ports"][0]["containerPort"] == options.port
        else:
            assert isinstance(options, WorkerOptions)
            resolved = resolve(options, pod.role)
            own = Keys.load(resolved.key_file, resolved.peer_keys)
            assert own is not None
            check_dial("listen", f"{resolved.listen}#{own.name}", own)
            assert resolved.listen == "tcp://10.1.2.3:5601"
            assert resolved.metrics_host == "10.1.2.3"
            ports = {one["name"]: one["containerPort"] for one in template.container["ports"]}
            assert ports == {"control": 5601, "metrics": resolved.metrics_port}
            assert resolved.worker_id == own.name == pod.name
            assert resolved.shutdown_timeout_s >= (
                resolved.request_timeout_s + resolved.transfer_timeout_s
            )
            set_name = pod.name.rpartition("-")[0]
            listening.append(f"tcp://{pod.name}.{set_name}:5601#{own.name}")
        assert template.spec["terminationGracePeriodSeconds"] >= waits_s + GRACE_S
    assert sorted(dialled) == sorted(listening)


def test_a_key_that_the_program_does_not_know_is_found(
    keys: dict[tuple[str, str], dict[str, str]], tmp_path: Path
) -> None:
    documents = plain_base()
    config = next(one for one in documents if one["kind"] == "ConfigMap")
    text = config["data"]["kvxfer.toml"]
    config["data"]["kvxfer.toml"] = text.replace("metrics_port", "metric_port")
    _, pod = pods_of(documents, keys, tmp_path)[0]
    with pytest.raises(UsageError, match="metric_port"):
        parsed(pod)


def test_variables_of_a_service_are_not_taken_for_options() -> None:
    """Kubernetes would give each pod of the namespace KVXFER_ROUTER_PORT and the like."""
    for template in pod_templates(plain_base()):
        assert template.spec["enableServiceLinks"] is False


def test_ports_of_ucx_are_those_that_policies_let_through() -> None:
    documents = plain_base()
    for template in pod_templates(documents):
        if template.role == "router":
            continue
        (value,) = [
            one["value"] for one in template.container["env"] if one["name"] == "UCX_TCP_PORT_RANGE"
        ]
        first, last = map(int, value.split("-"))
        (policy,) = [
            one["spec"]
            for one in documents
            if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith(template.role)
        ]
        for rules in (policy["ingress"], policy["egress"]):
            ranges = [port for rule in rules for port in rule["ports"] if "endPort" in port]
            assert [(one["port"], one["endPort"]) for one in ranges] == [(first, last)]


def test_only_those_reach_a_worker_that_have_to() -> None:
    reached: dict[str, dict[str | int, set[str]]] = {}
    for one in plain_base():
        if one["kind"] == "NetworkPolicy":
            assert one["spec"]["policyTypes"] == ["Ingress", "Egress"]
            mine = reached.setdefault(one["metadata"]["name"].removeprefix("kvxfer-"), {})
            for rule in one["spec"]["ingress"]:
                roles = {
                    peer["podSelector"]
                    .get("matchLabels", {})
                    .get("app.kubernetes.io/component", "all")
                    for peer in rule["from"]
                }
                for port in rule["ports"]:
                    mine[port["port"]] = roles
    assert reached == {
        "router": {"http": {"all"}},
        "prefill": {"control": {"router", "decode"}, 5700: {"decode"}},
        "decode": {"control": {"router"}, 5700: {"prefill"}},
    }


# --- keys and volumes -----------------------------------------------------------------------------


def keys_sh(directory: Path, *counts: str) -> None:
    program = directory.parent / "kvxfer"
    program.write_text(f'#!/bin/sh\nexec {" ".join(KVXFER)} "$@"\n')
    program.chmod(0o755)
    command = (str(KUBERNETES / "keys.sh"), str(directory), *counts)
    done = run(*command, **{**os.environ, "KVXFER": str(program)})
    assert done.code == 0, done.err


@pytest.mark.slow
def test_keys_sh_makes_what_the_manifests_want(tmp_path: Path) -> None:
    """Called again for more workers, it leaves what is there."""
    directory = tmp_path / "keys"
    keys_sh(directory, "1", "1")
    before = {path.name: path.read_bytes() for path in directory.glob("kvxfer-*")}
    keys_sh(directory, "2", "1")
    after = {path.name: path.read_bytes() for path in directory.glob("kvxfer-*")}
    assert before.items() <= after.items()
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    kustomize()
    secrets = {one["metadata"]["name"]: one["data"] for one in rendered(directory)}
    assert schema_problems(rendered(directory)) == []
    workers = ["kvxfer-prefill-0", "kvxfer-prefill-1"], ["kvxfer-decode-0"]
    assert {name: sorted(data) for name, data in secrets.items()} == {
        "kvxfer-router-key": ["kvxfer-router.key"],
        "kvxfer-prefill-keys": [f"{one}.key" for one in workers[0]],
        "kvxfer-decode-keys": [f"{one}.key" for one in workers[1]],
        "kvxfer-peers": sorted(f"{one}.pub" for one in (*workers[0], *workers[1], "kvxfer-router")),
    }
    held = base64.b64decode(secrets["kvxfer-router-key"]["kvxfer-router.key"])
    assert held == before["kvxfer-router.key"]


@pytest.mark.parametrize("arguments", [(), ("x", "0"), ("x", "two"), ("x", "1", "1", "1")])
def test_keys_sh_refuses_what_makes_no_sense(arguments: tuple[str, ...], tmp_path: Path) -> None:
    given = [str(tmp_path / one) if one == "x" else one for one in arguments]
    done = run(str(KUBERNETES / "keys.sh"), *given)
    done.check_one_clear_line(2, "usage" if len(given) in (0, 4) else arguments[1])
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_taken_from_the_secret_is_revoked(
    keys: dict[tuple[str, str], dict[str, str]], tmp_path: Path
) -> None:
    """Of a volume as kubelet makes and replaces it; its own directory is refused."""
    _, pod = pods_of(plain_base(), keys, tmp_path)[0]
    options = parsed(pod)["options"]
    assert isinstance(options, RouterOptions)
    assert options.peer_keys is not None
    with pytest.raises(UsageError, match="written by you alone"):
        Keys.load(options.key_file, options.peer_keys.parent)
    own = Keys.load(options.key_file, options.peer_keys)
    assert own is not None
    public = own.named("x", "x", "kvxfer-decode-0")
    left = dict(keys["Secret", "kvxfer-peers"])
    del left["kvxfer-decode-0.pub"]
    put_files(options.peer_keys.parent, left, 0o444)
    own.refresh()
    assert not own.allows(public)
    assert own.allows(own.named("x", "x", "kvxfer-prefill-0"))
