"""The version gate of the HIP driver, from both sides, over a stub of the runtime.

Not collected by itself: tests/contracts/test_vmm_driver.py runs it in a process with the stub.
"""

import pytest
from support import vmm_stub

from kvxfer.errors import DriverError, DriverTooOld
from kvxfer.memory.hip import HipDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer

G = 2 << 20
STUB = vmm_stub.loaded_stub()


@pytest.fixture(autouse=True)
def nothing_is_left(conserved):
    STUB.reset()
    yield
    assert not any(STUB.live().values())


def grow_unevenly():
    with VirtualBuffer(HipDriver(), 24 * G) as buffer:
        for offset, granules in ((0, 1), (8, 3), (1, 2)):
            buffer.commit([(offset * G, granules * G)])


@pytest.mark.parametrize(("encoded", "found"), [(70253211, "7.2"), (71199999, "7.11"), (0, "0.0")])
def test_a_broken_runtime_is_refused_before_anything_else(monkeypatch, encoded, found):
    monkeypatch.setenv("STUB_HIP_VERSION", str(encoded))
    with pytest.raises(DriverTooOld, match=f"found version {found}, needed 7.12") as caught:
        HipDriver()
    assert (caught.value.found, caught.value.needed, caught.value.code) == (found, "7.12", encoded)
    assert STUB.log() == ["hipRuntimeGetVersion"]


@pytest.mark.parametrize("encoded", [71200000, 71260850, 71460850, 100060850])
def test_a_mended_runtime_is_taken_and_grows_unevenly(monkeypatch, encoded):
    monkeypatch.setenv("STUB_HIP_VERSION", str(encoded))
    grow_unevenly()


def test_what_the_refused_runtimes_would_do(monkeypatch):
    driver = HipDriver()
    monkeypatch.setenv("STUB_HIP_VERSION", "71160850")
    with VirtualBuffer(driver, 24 * G) as buffer:
        buffer.commit([(0, 2 * G)])
        before = buffer.chunks, STUB.live()
        with pytest.raises(DriverError, match="hipMemSetAccess"):
            buffer.commit([(12 * G, G)])
        assert (buffer.chunks, STUB.live()) == before
