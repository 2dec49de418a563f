"""What the demo gives its workers."""

from kvxfer.demo import plan


def test_a_gpu_that_workers_share_needs_more_room_than_the_host(monkeypatch, tmp_path):
    """Each measures the others' contexts, too: 1 GiB was all taken by them on an H200."""
    control = tmp_path / "nvidiactl"
    monkeypatch.setattr(plan, "NVIDIA_CONTROL", control)
    host = plan.worker_budget_bytes("cpu")
    assert host <= plan.WORKER_BUDGET_BYTES
    assert plan.worker_budget_bytes("auto") <= plan.WORKER_BUDGET_BYTES
    control.touch()
    for device in ("auto", "cuda", "cuda:1"):
        assert plan.worker_budget_bytes(device) == plan.GPU_WORKER_BUDGET_BYTES
    assert plan.worker_budget_bytes("cpu") <= plan.WORKER_BUDGET_BYTES
