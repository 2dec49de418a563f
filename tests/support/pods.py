"""Pods of a manifest as this machine can have them: volumes as directories laid out as by kubelet,
variables put in, and the command that a container would run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands import TINY_MODEL
from support.manifests import Document, PodTemplate

USER = 10001
GROUP_READ = 0o040
_VARIABLE = re.compile(r"\$\(([A-Za-z0-9_]+)\)")


@dataclass(frozen=True)
class Pod:
    """One that runs here: paths of its container are below `root`."""

    name: str
    role: str
    arguments: list[str]
    environment: dict[str, str]
    root: Path

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def node(self) -> Path:
        """Where directories of the node are, which pods share."""
        return self.root.parent / "node"


def make_pod(
    template: PodTemplate,
    name: str,
    address: str,
    root: Path,
    volumes: Mapping[tuple[str, str], Mapping[str, str]],
) -> Pod:
    """`volumes`: the files of each ConfigMap and Secret, by kind and name. The bundled model stands
    for any."""
    container, directories = template.container, {}
    by_name = {one["name"]: one for one in template.spec["volumes"]}
    for mount in container["volumeMounts"]:
        volume = by_name[mount["name"]]
        if "hostPath" in volume:
            directories[mount["mountPath"]] = _of_node(root.parent, volume["hostPath"]["path"])
            continue
        directory = root / mount["mountPath"].lstrip("/")
        directory.mkdir(parents=True)
        directories[mount["mountPath"]] = directory
        _fill(directory, volume, volumes)

    directories |= dict.fromkeys(("/models/tiny", "/models/model"), TINY_MODEL)
    paths = "|".join(map(re.escape, sorted(directories, key=len, reverse=True)))
    place = re.compile(rf"(?<![\w./-])({paths})(?![\w.-])")

    def here(text: str) -> str:
        return place.sub(lambda match: str(directories[match[1]]), text)

    for path in root.rglob("*.toml"):
        if not path.is_symlink():
            path.write_text(here(path.read_text()))
    environment = {key: here(text) for key, text in variables(container, name, address).items()}
    return Pod(name, template.role, [here(one) for one in container["args"]], environment, root)


def variables(container: Document, name: str, address: str) -> dict[str, str]:
    """As kubelet puts them in: $(NAME) stands for one that was defined before."""
    found: dict[str, str] = {}
    fields = {"status.podIP": address, "metadata.name": name}
    for one in container["env"]:
        source: dict[str, Any] = one.get("valueFrom", {})
        if "fieldRef" in source:
            found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif not source:
            found[one["name"]] = _VARIABLE.sub(
                lambda match: found.get(match[1], match[0]), one["value"]
            )
    return found


def _of_node(pods: Path, path: str) -> Path:
    """Shared by the pods; made as deploy/README.md says."""
    directory = pods / "node" / path.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    os.chown(directory, USER, USER)
    return directory


def _fill(
    directory: Path, volume: Document, volumes: Mapping[tuple[str, str], Mapping[str, str]]
) -> None:
    """A ConfigMap's or Secret's files: root's, readable by `fsGroup`, behind a link that is
    replaced when they change, in a directory that is open to all."""
    if "configMap" in volume:
        files, mode = volumes["ConfigMap", volume["configMap"]["name"]], 0o644
    elif "secret" in volume:
        told = volume["secret"]
        files, mode = volumes["Secret", told["secretName"]], told["defaultMode"]
        mode |= GROUP_READ if os.getuid() == 0 else 0  # else the file is ours, and ours alone
    else:
        directory.chmod(0o777)
        return
    put_files(directory, files, mode)


def put_files(directory: Path, files: Mapping[str, str], mode: int) -> None:
    """Also over what is there, at once, as kubelet does."""
    data = directory / f"..{len(list(directory.iterdir()))}"
    data.mkdir()
    data.chmod(0o755)
    for name, text in files.items():
        (data / name).write_text(text)
        (data / name).chmod(mode)
        if os.getuid() == 0:
            os.chown(data / name, 0, USER)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(Path("..data", name))
    draft = directory / "..data_tmp"
    draft.symlink_to(data.name)
    draft.rename(directory / "..data")
    directory.chmod(0o1777)
