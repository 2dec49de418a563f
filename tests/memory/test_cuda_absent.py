"""Without a driver the CUDA module can be imported, and says so when it is used."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvxfer.errors import DriverError
from kvxfer.memory import cuda


def test_construction_without_a_driver_is_a_typed_error():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(DriverError, match="cuInit"):
        cuda.CudaDriver()


def test_importing_the_module_loads_no_bindings():
    code = "import sys, kvxfer.memory.cuda; sys.exit('cuda.bindings' in sys.modules)"
    root = Path(cuda.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
