"""What is particular to GPU memory; the rest is tests/contracts/test_vmm_driver.py."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvxfer.errors import DriverError
from kvxfer.memory import cuda
from kvxfer.memory.extensible_tensor import ExtensibleTensor
from kvxfer.memory.virtual_buffer import VirtualBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

GIB = 1 << 30

TOUCH_UNCOMMITTED = """
import torch
from kvxfer.memory.cuda import CudaDriver
from kvxfer.memory.extensible_tensor import ExtensibleTensor
from kvxfer.memory.virtual_buffer import VirtualBuffer
buffer = VirtualBuffer(CudaDriver(), 1 << 30)
size = buffer.commit([(0, 2 << 20)])[0].size
tensor = ExtensibleTensor(buffer, torch.uint8).tensor
tensor[size - 1] = 1
torch.cuda.synchronize()
print("committed works", flush=True)
tensor[size] = 1
torch.cuda.synchronize()
print("uncommitted works", flush=True)
"""


@pytest.fixture
def driver():
    return cuda.CudaDriver()


@pytest.fixture
def buffer(driver):
    with VirtualBuffer(driver, 64 * GIB) as buffer:
        yield buffer


def test_chunks_can_be_exported_and_granularity_is_asked_of_the_driver(driver):
    assert driver.can_export, driver.refused
    assert driver.granularity % (1 << 16) == 0
    assert driver.device == f"cuda:{torch.cuda.current_device()}"


def test_base_and_views_are_stable_through_growth_and_release(buffer, driver):
    extensible = ExtensibleTensor(buffer, torch.bfloat16)
    step = driver.granularity
    view = extensible.view((2, step // 2), (32 * GIB, 2))
    pointers = buffer.base_address, extensible.tensor.data_ptr(), view.data_ptr()
    buffer.commit([(0, step), (32 * GIB, step)])
    view[0], view[1] = 1, 2
    buffer.commit([(step, 300 << 20), (32 * GIB + step, 300 << 20)])
    assert view.float().mean(dim=1).tolist() == [1, 2]
    buffer.release_physical()
    buffer.commit([(0, step), (32 * GIB, 2 * step)])
    view.fill_(3)
    assert view.float().mean() == 3
    assert (buffer.base_address, extensible.tensor.data_ptr(), view.data_ptr()) == pointers


def test_a_copy_crosses_chunk_edges(buffer):
    chunks = buffer.commit([(0, 192 << 20), (GIB, 192 << 20)])
    assert len(chunks) == 6
    whole = ExtensibleTensor(buffer, torch.int32).tensor
    count = (192 << 20) // 4
    source, destination = whole[:count], whole[GIB // 4 : GIB // 4 + count]
    source.copy_(torch.arange(count, dtype=torch.int32, device=source.device))
    destination.copy_(source)
    assert torch.equal(destination.cpu(), torch.arange(count, dtype=torch.int32))


def test_a_graph_captured_before_growth_replays_after_it(driver):
    with VirtualBuffer(driver, 4 * GIB) as buffer:
        tensor = ExtensibleTensor(buffer, torch.float32).tensor
        index = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        value = torch.ones(1, device=tensor.device)
        buffer.commit([(0, driver.granularity)])
        tensor.index_copy_(0, index, value)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.index_copy_(0, index, value)
        buffer.commit([(3 * GIB, 64 << 20)])
        index.fill_(3 * GIB // 4 + 5)
        value.fill_(7)
        graph.replay()
        assert tensor[3 * GIB // 4 + 5].item() == 7


def test_memory_comes_back(driver):
    with VirtualBuffer(driver, 4 * GIB) as buffer:
        before = driver.memory_info().free_bytes
        buffer.commit([(0, GIB)])
        assert before - driver.memory_info().free_bytes >= GIB
        buffer.release_physical()
        assert driver.memory_info().free_bytes == before


def test_any_thread_may_call_and_keeps_its_own_context(driver, buffer):
    outcome = []

    def body():
        chunks = buffer.commit([(0, 64 << 20)])
        buffer.decommit(chunks)
        outcome.append(driver.memory_info().total_bytes)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert outcome and outcome[0] > GIB
    assert not buffer.chunks


def test_touching_an_uncommitted_address_is_a_fault():
    command = [sys.executable, "-c", TOUCH_UNCOMMITTED]
    root = Path(cuda.__file__).parents[2]
    child = subprocess.run(command, cwd=root, timeout=120, capture_output=True, text=True)
    assert "uncommitted works" not in child.stdout
    assert "committed works" in child.stdout, child.stderr
    assert child.returncode != 0


def test_a_device_that_is_not_there_is_a_typed_error():
    with pytest.raises(DriverError, match=r"cuDeviceGet.*CUDA_ERROR_INVALID_DEVICE"):
        cuda.CudaDriver(torch.cuda.device_count())
