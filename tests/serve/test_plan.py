"""What `kvxfer serve` starts: addresses, devices, shares of memory, flags."""

from pathlib import Path

import pytest

from kvxfer.config import CPU_KV_CACHE_BYTES, WorkerOptions
from kvxfer.errors import UsageError
from kvxfer.serve.plan import Machine, as_arguments, count_gpus, plan_serve
from kvxfer.serve.run import worker_environment

RUN_DIR = Path("/run/x")
GIB = 1 << 30


def plan(prefill=1, decode=1, num_gpus=0, free=64 * GIB, decode_options=None, **options):
    options = WorkerOptions(model=Path("/m"), **options)
    by_role = {"prefill": options, "decode": decode_options or options}
    counts = {"prefill": prefill, "decode": decode}
    return plan_serve(counts, by_role, Machine(num_gpus, free), RUN_DIR)


def flags(found):
    """By worker: name of the flag to its values."""
    told = {}
    for worker in found.workers:
        own = told.setdefault(worker.name, {})
        words = list(worker.arguments)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("--") else ""
            own.setdefault(name, []).append(value)
    return told


def test_each_has_an_address_and_decode_knows_all_prefill_workers():
    found = plan(2, 2)
    assert [(one.name, one.module) for one in found.workers] == [
        ("prefill-0", "prefill"), ("prefill-1", "prefill"),
        ("decode-0", "decode"), ("decode-1", "decode"),
    ]  # fmt: skip
    told = flags(found)
    prefills = [f"ipc://{RUN_DIR}/prefill-0", f"ipc://{RUN_DIR}/prefill-1"]
    assert found.addresses("prefill") == prefills
    assert told["decode-1"]["--prefill"] == prefills
    assert told["decode-1"]["--listen"] == [f"ipc://{RUN_DIR}/decode-1"]
    assert told["decode-1"]["--worker-id"] == ["decode-1"]
    assert "--prefill" not in told["prefill-0"]


def test_host_memory_is_divided():
    told = flags(plan(1, 3))
    for one in told.values():
        assert one["--memory-budget-bytes"] == [str(int(64 * GIB * 0.92) // 4)]
        assert one["--kv-cache-memory-bytes"] == [str(CPU_KV_CACHE_BYTES // 4)]
    small = flags(plan(1, 1, free=4 * GIB))["prefill-0"]
    assert "--kv-cache-memory-bytes" not in small, "measured, where it may not fit"
    given = flags(plan(1, 1, kv_cache_memory_bytes=GIB))["decode-0"]
    assert given["--kv-cache-memory-bytes"] == [str(GIB)]
    assert "--memory-budget-bytes" not in given


def test_gpus_are_given_in_turn():
    found = plan(2, 2, num_gpus=4)
    devices = {name: one["--device"] for name, one in flags(found).items()}
    assert list(devices.values()) == [["cuda:0"], ["cuda:1"], ["cuda:2"], ["cuda:3"]]
    assert not any("--gpu-memory-utilization" in one for one in flags(found).values())
    ranks = flags(plan(1, 1, num_gpus=4, tensor_parallel_size=2))
    assert ranks["decode-0"]["--device"] == ["cuda:2,cuda:3"]


def test_gpus_that_are_shared_are_divided_and_it_is_said():
    found = plan(2, 1, num_gpus=2)
    told = flags(found)
    assert [one["--device"] for one in told.values()] == [["cuda:0"], ["cuda:1"], ["cuda:0"]]
    assert {one["--gpu-memory-utilization"][0] for one in told.values()} == {"0.46"}
    assert all("share a GPU" in note for note in found.notes)
    asked = flags(plan(1, 1, num_gpus=1, gpu_memory_utilization=0.8))
    assert asked["decode-0"]["--gpu-memory-utilization"] == ["0.4"]
    named = flags(plan(1, 1, num_gpus=2, device="cuda:1"))
    assert named["decode-0"]["--device"] == ["cuda:1"]
    assert named["decode-0"]["--gpu-memory-utilization"] == ["0.46"]


def test_on_the_cpu_if_asked_for():
    told = flags(plan(1, 1, num_gpus=2, device="cpu"))["decode-0"]
    assert told["--device"] == ["cpu"]
    assert "--memory-budget-bytes" in told


def test_options_of_a_role_are_its_own():
    told = flags(plan(decode_options=WorkerOptions(model=Path("/m"), block_size=64)))
    assert told["decode-0"]["--block-size"] == ["64"]
    assert "--block-size" not in told["prefill-0"]


REFUSED = [
    ({"listen": "tcp://127.0.0.1:5"}, "listen"),
    ({"worker_id": "me"}, "worker_id"),
    ({"block_size": 0}, "block_size"),
    ({"num_gpus": 1, "tensor_parallel_size": 2}, "tensor_parallel_size"),
]


@pytest.mark.parametrize(("options", "field"), REFUSED)
def test_what_no_worker_would_take_is_refused(options, field):
    with pytest.raises(UsageError) as refused:
        plan(**options)
    assert refused.value.field == field


def test_flags_say_what_is_not_the_default():
    options = WorkerOptions(
        model=Path("/m"), enable_prefix_caching=False, enable_extensible_kv_cache=True,
        config=Path("/c"), ready_fd=5, kv_low_watermark=0.25,
    )  # fmt: skip
    assert as_arguments(options) == [
        "--model=/m", "--no-enable-prefix-caching", "--enable-extensible-kv-cache",
        "--kv-low-watermark=0.25",
    ]  # fmt: skip


def test_gpus_are_counted_without_torch(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path, {}) == 2
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 2


def test_workers_inherit_no_option_of_serve():
    told = {"KVXFER_API_KEY": "k", "KVXFER_PREFILL": "2", "KVXFER_CONFIG": "f", "HOME": "/"}
    kept = {"HOME": "/", "KVXFER_KV_CACHE_LAYOUT": "BHLNC", "KVXFER_PEER_DIR": "/p"}
    assert worker_environment({**told, **kept}) == kept


def test_with_keys_each_worker_is_dialled_by_the_name_of_its_key():
    """Of several that are allowed only one is right; where it listens it has no name."""
    found = plan(2, 1, key_file=Path("/keys/serve.key"), peer_keys=Path("/keys/allowed"))
    address = f"ipc://{RUN_DIR}/prefill-1"
    assert found.addresses("prefill")[1] == f"{address}#serve"
    told = flags(found)
    assert told["prefill-1"]["--listen"] == [address]
    assert told["decode-0"]["--prefill"] == found.addresses("prefill")
    assert told["decode-0"]["--key-file"] == ["/keys/serve.key"]
