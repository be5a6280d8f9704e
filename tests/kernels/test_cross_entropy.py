"""The linear cross-entropy on the CPU: the plain version here, the Triton kernels in an interpreter of their own."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_megapack.kernels import cross_entropy as plain_module
from hf_megapack.kernels.cross_entropy import HeadPart, linear_cross_entropy
from tests.helpers.cross_entropy import KINDS, TO_NEAREST, case_of, check_terms, reference_terms, split_head
from tests.helpers.interpreter import run_in_interpreter
from tests.helpers.thread_ranks import run_on_threads


def run_plain(case, head):
    return linear_cross_entropy(case.hidden, head, case.labels, case.weights, wants_grad=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [0, 1, 7])
def test_the_plain_version_equals_float64_on_whole_logits(kind, num_slots, monkeypatch):
    monkeypatch.setattr(plain_module, "PLAIN_LOGITS", 3 * 75)
    case = case_of(kind, num_slots=num_slots, num_tokens=75, dtype=torch.float32, seed=num_slots)
    terms = run_plain(case, HeadPart(case.head, 0, 75, None))
    check_terms(terms, reference_terms(case), case, conversion=TO_NEAREST)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_plain_version_split_over_ranks(kind, num_ranks, monkeypatch):
    """The last rank of three holds padding alone."""
    case = case_of(kind, num_slots=5, num_tokens=75, dtype=torch.float32, seed=num_ranks)
    parts = run_on_threads(num_ranks, lambda group: run_plain(case, split_head(case, group, num_ranks)), monkeypatch)
    expected = reference_terms(case)
    for part in parts:
        whole = part._replace(grad_ND=sum(part.grad_ND.double() for part in parts))
        check_terms(whole, expected, case, conversion=TO_NEAREST)


def test_the_kernels_in_the_interpreter_equal_float64_on_whole_logits():
    if find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails on numpy 2.4: it makes a number of an array of one dimension")
    assert run_in_interpreter("interpreted_cross_entropy.py") >= 75


def test_without_a_gpu_triton_need_not_be_installed():
    """None in sys.modules makes an import fail as if the module were missing. Megatron-Core 0.19 itself imports it."""
    ours = "hf_megapack.megatron.loss, hf_megapack.kernels.cross_entropy, hf_megapack.kernels.tree_blocks"
    code = f"import hf_megapack.megatron, sys; sys.modules['triton'] = None; import {ours}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
