"""Two network namespaces of this machine joined by a virtual link, as two hosts are by a cable.

Facts, measured on Linux 6.18 with iproute2 6.1:
- A namespace lives as long as a process in it; with the last one its end of the link goes too. So
  they have no names, and are held by two processes that end when a pipe from us closes, however
  we end: there is nothing to clean up.
- UCX finds its devices in /sys/class/net, and sysfs shows those of the namespace that it was
  mounted in. So each side has a mount namespace too, the machine's but for /sys (`ip netns exec`
  does the same); without it UCX finds no device and NIXL answers NIXL_ERR_BACKEND.
- /proc/PID/net/dev shows the counters of the namespace that PID is in, whoever reads it.
- `tbf` shapes what an interface sends, counted with Ethernet, IP and TCP headers (66 of the 1,514
  bytes of a full packet), so that of 1 Gbit/s TCP has at most 0.956 for what it carries. It splits
  the kernel's large packets where they are more than its burst. Delay and loss (`netem`) are not
  in every kernel.
- Unix sockets with a path, shared memory and cross-memory attach do not mind network namespaces:
  UCX takes the link only where UCX_TLS leaves it nothing else.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from kvxfer.errors import KvxferError

TOOLS = ("ip", "nsenter", "tc", "unshare")
DEVICE = "kvx0"
"""The name of either end of the link, each in its own namespace."""
ADDRESSES: Mapping[str, str] = {"left": "10.213.0.1", "right": "10.213.0.2"}
PREFIX_BITS = 30
OVER_TCP: Mapping[str, str] = {"UCX_TLS": "tcp,cuda_copy", "UCX_NET_DEVICES": DEVICE}
"""What UCX must be told in the namespaces; cuda_copy brings GPU memory to TCP, where there is any.
The loopback devices, which UCX would offer its peers beside the link, lead nowhere."""
CLONE_FS = 0x200
COMMAND_TIMEOUT_S = 10.0
BURST_BYTES = 128 << 10
LONGEST_QUEUE = "20ms"
_HOLD = "mount -t sysfs sysfs /sys && {more} && echo held && exec cat"
"""The line says that all is there; cat then waits for the end of its input."""


def why_not() -> str:
    """Why namespaces cannot be made here, or ''. Tries it."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (iproute2, util-linux)"
    try:
        with Namespaces():
            return ""
    except KvxferError as error:
        return str(error)


class Namespaces:
    """'left' and 'right', joined. A context; nothing of it outlives this process. All methods raise
    KvxferError where the system refuses."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Namespaces:
        with ExitStack() as undo:
            for side in ADDRESSES:
                self._holders[side] = hold(undo)
            peer = str(self._holders["right"].pid)
            self._run("left", f"ip link add {DEVICE} type veth peer name {DEVICE} netns {peer}")
            for side, address in ADDRESSES.items():
                self._run(side, f"ip address add {address}/{PREFIX_BITS} dev {DEVICE}")
                self._run(side, f"ip link set {DEVICE} up")
                self._run(side, "ip link set lo up")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def entering(self, side: str) -> list[str]:
        """What to put before a command that is to run in the namespace of `side`, with UCX told
        to use the link. The command takes its place: the process keeps its id."""
        settings = [f"{name}={value}" for name, value in OVER_TCP.items()]
        kinds = [f"--{kind}={path}" for kind, path in self.paths(side).items()]
        return ["nsenter", *kinds, f"--wd={Path.cwd()}", "--", "env", *settings]

    def paths(self, side: str) -> dict[str, str]:
        """By kind, the files that stand for the namespaces of `side`, for `setns`."""
        own = f"/proc/{self._holders[side].pid}/ns"
        return {"net": f"{own}/net", "mount": f"{own}/mnt"}

    def shape(self, mbit: int) -> None:
        """Limit both directions to `mbit` Mbit/s, headers and all."""
        for side in ADDRESSES:
            limit = f"rate {mbit}mbit burst {BURST_BYTES} latency {LONGEST_QUEUE}"
            self._run(side, f"tc qdisc replace dev {DEVICE} root tbf {limit}")

    def sent_bytes(self, side: str) -> int:
        """What `side` has put on the link so far, headers included."""
        text = Path(f"/proc/{self._holders[side].pid}/net/dev").read_text()
        for line in text.splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == DEVICE:
                return int(counters.split()[8])
        raise KvxferError(f"{side} has no {DEVICE}")

    def _run(self, side: str, command: str) -> None:
        wrapped = [*self.entering(side), *command.split()]
        try:
            done = subprocess.run(
                wrapped, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise KvxferError(f"{command}: not within {COMMAND_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            words = " ".join(done.stderr.split()) or f"code {done.returncode}"
            raise KvxferError(f"{command}: {words}")


def enter(paths: Mapping[str, str]) -> None:
    """Put this thread, and those that it starts, into the namespaces of `Namespaces.paths`. Threads
    that are there already, such as those of numpy, stay where they were."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_FS) != 0:  # what threads share keeps them in one mount namespace
        raise KvxferError(f"unshare: {os.strerror(ctypes.get_errno())}")
    for path in paths.values():
        with Path(path).open() as file:
            if libc.setns(file.fileno(), 0) != 0:
                raise KvxferError(f"setns to {path}: {os.strerror(ctypes.get_errno())}")


def hold(undo: ExitStack, more: str = "true") -> subprocess.Popen[bytes]:
    """A process in network and mount namespaces of its own, which ends when our end of its pipe
    closes. `more` is a shell command that has to succeed there first. Raises KvxferError."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "--", "sh", "-c", _HOLD.format(more=more)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    undo.callback(_let_go, holder)
    assert holder.stdout is not None and holder.stderr is not None
    is_told, _, _ = select.select([holder.stdout], [], [], COMMAND_TIMEOUT_S)
    if not is_told or not holder.stdout.readline():
        holder.kill()
        words = holder.stderr.read().decode(errors="replace").strip()
        raise KvxferError(f"cannot make a network namespace: {words or 'no answer'}")
    return holder


def _let_go(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
    holder.stdin.close()
    try:
        holder.wait(COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait(COMMAND_TIMEOUT_S)
    holder.stdout.close()
    holder.stderr.close()
