"""Tensors over a reservation stay valid through everything but close()."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import CacheError, CapacityExceeded
from kvxfer.memory.extensible_tensor import ExtensibleTensor
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer

G = 4096
SIZE = 64 * G


@pytest.fixture
def buffer():
    with VirtualBuffer(HostDriver(G), SIZE) as buffer:
        yield buffer


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_the_tensor_spans_the_reservation_and_touches_nothing(buffer, dtype):
    tensor = ExtensibleTensor(buffer, dtype).tensor
    assert tensor.dtype == dtype
    assert tensor.data_ptr() == buffer.base_address
    assert tensor.nbytes == tensor.untyped_storage().nbytes() == SIZE
    assert not buffer.committed


def test_a_terabyte_can_be_spanned():
    with VirtualBuffer(HostDriver(), 1 << 40) as buffer:
        tensor = ExtensibleTensor(buffer, torch.bfloat16).tensor
        buffer.commit([((1 << 40) - (1 << 16), 1 << 16)])
        tensor[-1] = 2.5
        assert tensor[-1] == 2.5


def test_views_live_through_growth_release_and_recommit(buffer):
    extensible = ExtensibleTensor(buffer, torch.float32)
    view = extensible.view((2, G // 4), (8 * G, 4))
    pointers = extensible.tensor.data_ptr(), view.data_ptr()
    buffer.commit([(0, G), (8 * G, G)])
    view[0], view[1] = 1, 2
    buffer.commit([(G, 7 * G), (9 * G, 7 * G)])
    assert view.mean(dim=1).tolist() == [1, 2]
    assert extensible.tensor[: 16 * G // 4].sum() == 3 * G // 4
    buffer.release_physical()
    buffer.commit([(0, 9 * G)])
    assert not view.any()
    view.fill_(3)
    assert ctypes.string_at(buffer.base_address + 8 * G, 4) == np.float32(3).tobytes()
    assert (extensible.tensor.data_ptr(), view.data_ptr()) == pointers


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    offset=st.integers(0, 64),
    data=st.data(),
)
def test_a_view_reads_the_bytes_that_its_strides_name(shape, offset, data):
    strides = data.draw(st.lists(st.integers(0, 300), min_size=len(shape), max_size=len(shape)))
    with VirtualBuffer(HostDriver(G), 2 * G) as buffer:
        buffer.commit([(0, 2 * G)])
        extensible = ExtensibleTensor(buffer, torch.int16)
        extensible.tensor.copy_(torch.arange(G, dtype=torch.int16))
        view = extensible.view(shape, [2 * step for step in strides], 2 * offset)
        expected = np.full(shape, offset)
        for axis, stride in enumerate(strides):
            expected += stride * np.indices(shape)[axis]
        assert np.array_equal(view.numpy(), expected)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "error"),
    [
        ((4,), (2,), 0, CacheError),
        ((4,), (-4,), 64, CacheError),
        ((4,), (4,), 2, CacheError),
        ((4,), (4,), -4, CacheError),
        ((4, 4), (4,), 0, CacheError),
        ((-1,), (4,), 0, CacheError),
        ((SIZE // 4 + 1,), (4,), 0, CapacityExceeded),
        ((2,), (SIZE,), 0, CapacityExceeded),
        ((), (), SIZE, CapacityExceeded),
        ((1,), (4,), SIZE, CapacityExceeded),
    ],
)
def test_a_view_beyond_the_reservation_or_between_elements_is_refused(
    buffer, shape, strides, offset, error
):
    with pytest.raises(error):
        ExtensibleTensor(buffer, torch.float32).view(shape, strides, offset)


def test_the_last_element_of_the_reservation_can_be_viewed(buffer):
    buffer.commit([(SIZE - G, G)])
    view = ExtensibleTensor(buffer, torch.float32).view((2, 1), (SIZE - G, 4), G - 4)
    view[1] = 5
    assert ctypes.string_at(buffer.base_address + SIZE - 4, 4) == np.float32(5).tobytes()


def test_dlpack_shares_the_memory(buffer):
    buffer.commit([(0, SIZE)])
    extensible = ExtensibleTensor(buffer, torch.int32)
    for importer in (torch.from_dlpack, np.from_dlpack):
        other = importer(extensible)
        extensible.tensor[-1] = 41
        other[0] = 42
        assert (int(other[-1]), int(extensible.tensor[0])) == (41, 42)
        assert len(other) == SIZE // 4
