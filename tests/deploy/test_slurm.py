"""deploy/slurm/kvxfer.sbatch: checked as a script and, with --slow, run by a real Slurm whose nodes
are all this host (`support.slurm`). It was never run on a cluster of several hosts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import psutil
import pytest
from support.commands import ROOT, TINY_MODEL
from support.shipped import DEPLOY
from support.slurm import SlurmCluster, missing

SCRIPT = DEPLOY / "slurm" / "kvxfer.sbatch"
SMALL = f"--device cpu --memory-budget-bytes {1 << 30}"
START_TIMEOUT_S = 400


def test_bash_reads_it():
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not here: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "")


def test_options_for_sbatch_come_before_any_command():
    """sbatch reads no further than the first line that is neither blank nor a comment."""
    lines = SCRIPT.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    found = [line for line in lines[:first] if line.startswith("#SBATCH ")]
    assert len(found) == sum("#SBATCH" in line for line in lines) >= 5
    drain_s = int(next(line for line in found if "--signal" in line).partition("@")[2])
    given = {name: int(default) for name, default in defaults("ROUTER_DRAIN_S", "WORKER_DRAIN_S")}
    assert sum(given.values()) + 2 * 5 < drain_s, "drained before the time limit"


def defaults(*names):
    for name in names:
        yield name, SCRIPT.read_text().partition(f"{name}=${{{name}:-")[2].partition("}")[0]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "no Slurm job: start this with sbatch"),
        ({"MODEL": ""}, "MODEL: give the directory of the model"),
        ({"PREFILL_NODES": "two"}, "PREFILL_NODES 'two': must be a number"),
        ({"PREFILL_NODES": "0"}, "PREFILL_NODES '0': each role needs a node of its own, of 4"),
        ({"PREFILL_NODES": "4"}, "PREFILL_NODES '4': each role needs a node of its own, of 4"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, environment, said):
    scontrol = tmp_path / "scontrol"  # the only command of Slurm's that it has needed by then
    scontrol.write_text("#!/bin/sh\nprintf 'host%s\\n' 1 2 3 4\n")
    scontrol.chmod(0o700)
    runs = tmp_path / "runs"
    runs.mkdir()
    known = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "host[1-4]",
        "MODEL": "x",
        "RUN_ROOT": str(runs),
    }
    done = subprocess.run(
        ["bash", SCRIPT], capture_output=True, text=True, timeout=10,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **known, **environment},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")
    assert list(runs.iterdir()) == []


# --- with a real Slurm ----------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path, leaves_nothing_behind):
    if reason := missing():
        pytest.skip(reason)
    root = tmp_path / "slurm"
    root.mkdir()
    with SlurmCluster(root, 4) as found:
        yield found


class Job:
    """The script, submitted as a user does."""

    def __init__(self, cluster, root, **variables):
        command = root / "kvxfer"
        python = shlex.join([sys.executable, "-m", "kvxfer.cli"])
        command.write_text(
            f'#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\nexec {python} "$@"\n'
        )
        command.chmod(0o700)
        told = {"KVXFER": str(command), "MODEL": str(TINY_MODEL), "NET_INTERFACE": "lo",
                "RUN_ROOT": str(root), "PREFILL_ARGS": SMALL, "DECODE_ARGS": SMALL}  # fmt: skip
        self.cluster, self.log = cluster, root / "job.log"
        words = ["sbatch", "--parsable", f"--output={self.log}", SCRIPT]
        self.id = cluster.run(*words, **told | variables).strip()
        self.run_dir = root / f"kvxfer-{self.id}"

    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def client(self):
        lines = (self.run_dir / "client.env").read_text().splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    def url(self):
        return self.client()["OPENAI_BASE_URL"].removesuffix("/v1")

    def ask(self, path, body=None):
        """Status and answer; 0 where there is none."""
        told = self.client()
        headers = {
            "Authorization": f"Bearer {told['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        }
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url() + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {}
        except OSError:
            return 0, {}

    def is_ready(self):
        if not (self.run_dir / "client.env").exists():
            assert self.cluster.state(self.id) in ("PENDING", "CONFIGURING", "RUNNING"), self.said()
            return False
        told = self.ask("/ready")[1]
        return (told.get("prefill"), told.get("decode")) == (2, 2)

    def processes(self, worker_id):
        for one in psutil.process_iter(["cmdline"]):
            words = one.info["cmdline"] or [""]
            is_ours = worker_id in words and str(self.run_dir / "keys" / "job.key") in words
            if is_ours and "bash" not in words[0] and "srun" not in words[0]:
                yield one


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_serves_restarts_a_worker_and_drains(cluster, tmp_path):
    job = Job(cluster, tmp_path)
    cluster.until(job.is_ready, f"ready: {job.log}", START_TIMEOUT_S)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in job.run_dir.rglob("*")}
    assert stat.S_IMODE(job.run_dir.stat().st_mode) == modes["keys"] == 0o700
    assert modes["job.key"] == modes["client.env"] == modes["router.toml"] == 0o600
    body = {"model": str(TINY_MODEL), "prompt": "To be, or not to be", "max_tokens": 8}
    status, told = job.ask("/v1/completions", body)
    assert status == 200 and told["usage"]["completion_tokens"] == 8

    (worker,) = job.processes("prefill-host2")
    worker.kill()
    again = "prefill-host2: ended with code 137, is started again"
    cluster.until(lambda: again in job.said(), "the worker is started again")
    log = job.run_dir / "prefill-host2.log"
    is_back = lambda: log.read_text().count("prefill INFO ready\n") == 2  # noqa: E731
    cluster.until(is_back, "it is ready again", START_TIMEOUT_S)
    cluster.until(job.is_ready, "the router has it back")

    long = {**body, "max_tokens": 600, "ignore_eos": True}
    answers = []
    asking = threading.Thread(target=lambda: answers.append(job.ask("/v1/completions", long)))
    asking.start()
    metrics = lambda: urllib.request.urlopen(job.url() + "/metrics", timeout=10)  # noqa: E731
    running = 'kvxfer_num_requests_running{role="router",worker="router"} 1.0'
    cluster.until(lambda: running in metrics().read().decode(), "the answer is under way")
    cluster.run("scancel", "--batch", "--signal=TERM", job.id)
    cluster.until(lambda: cluster.state(job.id) == "COMPLETED", "the job ends", 150)
    asking.join(10)
    ((status, told),) = answers
    assert status == 200 and told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 600
    assert "is killed" not in job.said() and "draining" in job.said()
    left = {path.name for path in job.run_dir.iterdir()}
    assert "client.env" in left and not left & {"keys", "steps", "router.toml"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrong_option_ends_the_job(cluster, tmp_path):
    job = Job(cluster, tmp_path, DECODE_ARGS="--block-size 0")
    cluster.until(lambda: cluster.state(job.id) == "FAILED", "the job fails", 150)
    given_up = [line for line in job.said().splitlines() if "is given up" in line]
    assert len(given_up) == 1 and "decode-host" in given_up[0] and "code 2" in given_up[0]
    name = given_up[0].split()[1].rstrip(":")
    assert "block_size" in (job.run_dir / f"{name}.log").read_text()
    assert not (job.run_dir / "keys").exists()
