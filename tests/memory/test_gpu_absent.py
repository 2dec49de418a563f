"""Without a driver the modules for GPUs can be imported, and say so when they are used."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvxfer.errors import DriverError
from kvxfer.memory import cuda, hip
from kvxfer.memory.gpu import HandleTypes


def test_construction_without_a_driver_is_a_typed_error():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DriverError, match="cuInit"):
        cuda.CudaDriver()


def test_construction_without_a_runtime_is_a_typed_error():
    if torch.version.hip:
        pytest.skip("this torch brings the HIP runtime")
    with pytest.raises(DriverError, match="libamdhip64"):
        hip.HipDriver()


def test_importing_the_modules_loads_no_bindings():
    imports = "import sys, kvxfer.memory.cuda, kvxfer.memory.hip"
    code = f"{imports}; sys.exit('cuda.bindings' in sys.modules)"
    root = Path(cuda.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_handle_types_have_the_vendor_s_values():
    from cuda.bindings import driver as api

    vendor = api.CUmemAllocationHandleType
    assert HandleTypes.POSIX_FD == vendor.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert HandleTypes.FABRIC == vendor.CU_MEM_HANDLE_TYPE_FABRIC
    assert HandleTypes.NONE == vendor.CU_MEM_HANDLE_TYPE_NONE


@pytest.mark.parametrize(
    ("encoded", "version"),
    [
        (70253211, (7, 2)),
        (71160850, (7, 11)),
        (71260850, (7, 12)),
        (71460850, (7, 14)),
        (100060850, (10, 0)),
    ],
)
def test_versions_of_the_hip_runtime_are_decoded(encoded, version):
    assert hip.decode_version(encoded) == version
