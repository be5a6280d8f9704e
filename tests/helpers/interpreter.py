"""Run a file of tests in Triton's interpreter: a process of its own, since Triton reads its setting at its import."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def run_in_interpreter(name: str) -> int:
    """Run a file of tests/kernels, or skip the calling test where Triton has no wheels.

    Args:
        name: File name.

    Returns:
        Number of tests that passed; none may fail or be skipped.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; it has no wheels for this platform")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", f"tests/kernels/{name}", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    return int(re.search(r"(\d+) passed", done.stdout)[1])
