"""Several 'hosts' on one machine: network namespaces on a switch, each with an identity of its own.

Facts, measured on Linux 6.18 with UCX 1.23 (those of `kvxfer.bench.netns` hold as well):
- kvxfer and UCX tell hosts apart by /proc/sys/kernel/random/boot_id. A file mounted over it makes a
  namespace another host for both: `peer`, shared memory and cross-memory attach are not tried, and
  nothing has to be set for NIXL to take the link.
- A bridge lets no frame through that is longer than the port it leaves by takes: all ports and all
  hosts have one MTU here.
"""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvxfer.bench.netns import BURST_BYTES, COMMAND_TIMEOUT_S, LONGEST_QUEUE, hold
from kvxfer.errors import KvxferError

DEVICE = "eth0"
NETWORK = "10.0.0"
PREFIX_BITS = 24
MTU = 1500
SWITCH = "switch"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Hosts:
    """`names`, each at `address(name)`, that reach each other through a switch. A context; nothing
    of it outlives this process. `directory` is for the files that make them hosts of their own; it
    outlives this. All methods raise KvxferError where the system refuses."""

    def __init__(self, directory: Path, names: Sequence[str], mtu: int = MTU) -> None:
        self.names = tuple(names)
        self._directory = directory
        self._mtu = mtu
        self._undo = ExitStack()
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            self._holders[SWITCH] = hold(undo)
            self.run(SWITCH, "ip link add br0 type bridge")
            self.run(SWITCH, "ip link set br0 up")
            for name in self.names:
                self._holders[name] = hold(undo, self._identity(name))
                self._plug_in(name)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def entering(self, name: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """What to put before a command that is to run on `name`. The command takes its place: the
        process keeps its id."""
        own = f"/proc/{self._holders[name].pid}/ns"
        settings = [f"{key}={value}" for key, value in (environment or {}).items()]
        kinds = [f"--net={own}/net", f"--mount={own}/mnt", f"--wd={Path.cwd()}"]
        return ["nsenter", *kinds, "--", "env", *settings]

    def run(self, name: str, command: str | Sequence[str]) -> str:
        """A command of the system's on `name`; what it printed."""
        words = command.split() if isinstance(command, str) else command
        try:
            done = subprocess.run(
                [*self.entering(name), *words],
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise KvxferError(f"{command}: not within {COMMAND_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"code {done.returncode}"
            raise KvxferError(f"{command} on {name}: {said}")
        return done.stdout

    def shape(self, mbit: int) -> None:
        """Limit what each host sends and gets to `mbit` Mbit/s, headers and all."""
        limit = f"root tbf rate {mbit}mbit burst {BURST_BYTES} latency {LONGEST_QUEUE}"
        for name in self.names:
            self.run(name, f"tc qdisc replace dev {DEVICE} {limit}")
            self.run(SWITCH, f"tc qdisc replace dev {name} {limit}")

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Pull the cable of `name` out at the switch, where its carrier goes, and put it back."""
        self.run(SWITCH, f"ip link set {name} down")
        try:
            yield
        finally:
            self.run(SWITCH, f"ip link set {name} up")

    @contextmanager
    def losing(self, percent: int) -> Iterator[None]:
        """Every host drops this share of the packets that come to it, as TCP will notice."""
        chain = "{ type filter hook input priority 0 ; }"
        for name in self.names:
            self.run(name, "nft add table inet losing")
            self.run(name, ["nft", f"add chain inet losing input {chain}"])
            which = f'iifname "{DEVICE}" numgen random mod 100 < {percent} counter drop'
            self.run(name, ["nft", f"add rule inet losing input {which}"])
        try:
            yield
        finally:
            for name in self.names:
                self.run(name, "nft delete table inet losing")

    def num_lost(self) -> int:
        """Packets that all hosts have dropped; while they are `losing`."""
        told = "".join(self.run(name, "nft list table inet losing") for name in self.names)
        return sum(map(int, re.findall(r"counter packets (\d+)", told)))

    def net(self, name: str) -> dict[str, str]:
        """For `kvxfer.bench.netns.enter`: a thread of ours that then talks as one on `name`."""
        return {"net": f"/proc/{self._holders[name].pid}/ns/net"}

    def sent_bytes(self, name: str) -> int:
        """What `name` has put on its link so far, headers included."""
        text = Path(f"/proc/{self._holders[name].pid}/net/dev").read_text()
        for line in text.splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == DEVICE:
                return int(counters.split()[8])
        raise KvxferError(f"{name} has no {DEVICE}")

    def _plug_in(self, name: str) -> None:
        pid = self._holders[name].pid
        self.run(
            SWITCH,
            f"ip link add name {name} mtu {self._mtu} type veth peer name {DEVICE} netns {pid}",
        )
        self.run(SWITCH, f"ip link set {name} master br0 up")
        self.run(name, f"ip link set {DEVICE} mtu {self._mtu}")
        self.run(name, f"ip address add {self.address(name)}/{PREFIX_BITS} dev {DEVICE}")
        self.run(name, f"ip link set {DEVICE} up")
        self.run(name, "ip link set lo up")

    def _identity(self, name: str) -> str:
        """The shell command that makes the machine another one for who looks."""
        file = self._directory / f"{name}.boot_id"
        file.write_text(f"{uuid.uuid4()}\n")
        return f"mount --bind '{file}' {BOOT_ID}"
