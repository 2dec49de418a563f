"""Where the sockets of `peer` are, and who may be there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from connectors import handover_socket
from connectors.handover_socket import Listener
from kvxfer.errors import UsageError

pytestmark = pytest.mark.usefixtures("conserved")


def test_a_directory_that_others_may_enter_is_refused(
    peer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, file = peer_directory / "link", peer_directory / "file"
    link.symlink_to(peer_directory)
    file.touch()
    for path, reason in ((link, "no directory"), (file, "no directory")):
        monkeypatch.setenv("KVXFER_PEER_DIR", str(path))
        with pytest.raises(UsageError, match=f"KVXFER_PEER_DIR: .*{reason}"):
            handover_socket.socket_directory()
    monkeypatch.setenv("KVXFER_PEER_DIR", str(peer_directory))
    for mode in (0o750, 0o701, 0o777):
        peer_directory.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:o}, not 700"):
            handover_socket.socket_directory()
    peer_directory.chmod(0o700)
    assert handover_socket.socket_directory() == peer_directory
    monkeypatch.setenv("KVXFER_PEER_DIR", str(peer_directory / "no" / "where"))
    with pytest.raises(UsageError, match="No such file"):
        handover_socket.socket_directory()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("KVXFER_PEER_DIR", str(peer_directory))
    with pytest.raises(UsageError, match="belongs to user"):
        handover_socket.socket_directory()


def test_the_default_directory_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVXFER_PEER_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = os.umask(0)
    try:
        made = handover_socket.socket_directory()
    finally:
        os.umask(before)
    assert made == tmp_path / f"kvxfer-{os.geteuid()}"
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    for room, fits in ((81, True), (82, False)):
        deep = tmp_path / ("d" * (room - len(str(tmp_path)) - 1))
        if len(deep.name) < 1:
            pytest.skip(f"{tmp_path} is too long itself")
        deep.mkdir(0o700)
        if fits:
            Listener(deep).close()
        else:
            with pytest.raises(UsageError, match="at most 81 bytes"):
                Listener(deep)
        assert not list(deep.iterdir())


def test_sockets_of_the_dead_are_removed_and_those_of_the_living_stay(peer_directory: Path) -> None:
    alive = Listener(peer_directory)
    dead = peer_directory / "00.peer"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(dead))
    other = Listener(peer_directory)
    names = {path.name for path in peer_directory.iterdir()}
    assert names == {alive.name, other.name}
    alive.close()
    other.close()
    other.close()
    assert not list(peer_directory.iterdir())
