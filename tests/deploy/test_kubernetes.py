"""The manifests of deploy/kubernetes: valid, whole, and harmless."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from support.commands import ROOT
from support.manifests import (
    EVERY,
    KUBERNETES,
    OVERLAYS,
    Document,
    documents_of,
    plain_base,
    privilege_problems,
    reference_problems,
    schema_problems,
    selector_problems,
)

CHECKS = (schema_problems, selector_problems, reference_problems, privilege_problems)
ALWAYS = [
    *["ConfigMap", "Deployment", "NetworkPolicy", "NetworkPolicy", "NetworkPolicy"],
    *["PodDisruptionBudget", "PodDisruptionBudget", "PodDisruptionBudget", "Service"],
    "ServiceAccount",
]
SETS = ["Service", "Service", "StatefulSet", "StatefulSet"]


@pytest.fixture(params=EVERY)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return documents_of(request.param)


# --- the API --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda one: one.__name__)
def test_nothing_is_wrong_with_the_manifests(
    documents: list[Document], check: Callable[[list[Document]], list[str]]
) -> None:
    assert check(documents) == []


@pytest.mark.parametrize("name", EVERY)
def test_all_kinds_are_there_and_known(name: str) -> None:
    """Validators pass over kinds that they do not know."""
    sets = ["LeaderWorkerSet"] * 2 if name == "lws" else SETS
    kinds = [one["kind"] for one in documents_of(name)]
    assert sorted(kinds) == sorted([*ALWAYS, *sets])


Check = Callable[[list[Document]], list[str]]
Harm = Callable[[Mapping[str, Document]], None]


def worker(documents: Mapping[str, Document]) -> Document:
    container: Document = documents["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    return container


def rename(node: Document, old: str, new: str) -> None:
    node[new] = node.pop(old)


HARMS: dict[str, tuple[Check, Harm, str]] = {
    "a typo": (
        schema_problems,
        lambda d: rename(worker(d), "livenessProbe", "livenesProbe"),
        "livenesProbe",
    ),
    "a typo deep inside": (
        schema_problems,
        lambda d: rename(worker(d)["ports"][0], "name", "nam"),
        "nam",
    ),
    "a wrong type": (
        schema_problems,
        lambda d: d["Service"]["spec"]["ports"][0].update(port="http"),
        "http",
    ),
    "privileged": (
        privilege_problems,
        lambda d: worker(d)["securityContext"].update(privileged=True),
        "privileged",
    ),
    "a capability": (
        privilege_problems,
        lambda d: worker(d)["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]),
        "added capabilities",
    ),
    "the node's network": (
        privilege_problems,
        lambda d: d["StatefulSet"]["spec"]["template"]["spec"].update(hostNetwork=True),
        "shares of the node",
    ),
    "no limits": (privilege_problems, lambda d: worker(d)["resources"].pop("limits"), "limits"),
    "no probe": (privilege_problems, lambda d: worker(d).pop("livenessProbe"), "probes"),
    "a port": (
        reference_problems,
        lambda d: worker(d)["readinessProbe"]["httpGet"].update(port="x"),
        "no port x",
    ),
    "a Secret": (
        reference_problems,
        lambda d: d["Deployment"]["spec"]["template"]["spec"]["volumes"][1]["secret"].update(
            secretName="none"
        ),
        "no Secret none",
    ),
    "a label": (
        selector_problems,
        lambda d: d["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].update(a="b"),
        "selects nothing",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_wrong_is_found(harm: str) -> None:
    documents = plain_base()
    check, act, mentioned = HARMS[harm]
    act({one["kind"]: one for one in documents})
    problems = check(documents)
    assert any(mentioned in problem for problem in problems), problems


@pytest.mark.parametrize("path", [["size"], ["restartPolicy"], ["sizes"]], ids="".join)
def test_what_is_wrong_with_a_leader_worker_set_is_found(path: list[str]) -> None:
    groups = KUBERNETES / "overlays" / "lws" / "groups" / "groups.yaml"
    document = next(iter(yaml.safe_load_all(groups.read_text())))
    document["spec"]["leaderWorkerTemplate"]["workerTemplate"] = {
        "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "worker", "image": "kvxfer"}]},
    }
    assert schema_problems([document]) == []
    document["spec"]["leaderWorkerTemplate"][path[0]] = "neither"
    (problem,) = schema_problems([document])
    assert "neither" in problem or path[0] in problem


# --- without kustomize ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(KUBERNETES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(KUBERNETES))
)
def test_each_file_is_yaml_and_names_files_that_are_there(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert document
        if path.name == "kustomization.yaml":
            for kind in ("resources", "components", "configurations"):
                for name in document.get(kind, ()):
                    assert (path.parent / name).exists(), name
            for one in document.get("patches", ()):
                assert yaml.safe_load(one["patch"])


def test_every_overlay_is_tested() -> None:
    found = {one.name for one in (KUBERNETES / "overlays").iterdir()}
    assert found == set(OVERLAYS)
    text = (ROOT / "deploy" / "README.md").read_text()
    assert all(f"overlays/{name}" in text for name in OVERLAYS)
