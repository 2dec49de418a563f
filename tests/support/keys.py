"""Keys of tests: a directory for each who has one, as on hosts of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kvxfer.control.auth import Keys, make_key_pair


class KeyRing:
    """Makes pairs of keys under `root`; `allowed` is a directory that all of them share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.allowed = root / "allowed"
        self.allowed.mkdir(mode=0o700)

    def make(self, name: str, *, allow: bool = True) -> Path:
        """The secret key's file. `allow`: whether its public key lies where all look."""
        secret, public = make_key_pair(self._root / f"of-{name}", name)
        if allow:
            shutil.copy2(public, self.allowed)
        return secret

    def keys(self, name: str, *, allow: bool = True) -> Keys:
        """Made if they are not there yet."""
        secret = self.secret(name)
        keys = Keys.load(secret if secret.exists() else self.make(name, allow=allow), self.allowed)
        assert keys is not None
        return keys

    def options(self, name: str) -> dict[str, Any]:
        """Of a worker that has the key called `name`."""
        return {"key_file": self.secret(name), "peer_keys": self.allowed}

    def secret(self, name: str) -> Path:
        return self._root / f"of-{name}" / f"{name}.key"

    def public(self, name: str) -> Path:
        return self._root / f"of-{name}" / f"{name}.pub"

    def revoke(self, name: str) -> None:
        (self.allowed / f"{name}.pub").unlink()
