"""The pointwise kernels in Triton's interpreter; on the GPU tests/megatron/test_gpu.py runs models on them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).with_name("interpreted_pointwise.py")


def test_the_kernels_in_the_interpreter_equal_plain_pytorch():
    """A process of its own, since Triton reads TRITON_INTERPRET when it is first imported."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; it has no wheels for this platform")
    command = [sys.executable, "-m", "pytest", str(INTERPRETED), "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == 23
    assert "skipped" not in done.stdout
