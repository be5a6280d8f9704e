"""The Triton kernels on a GPU, against float64 on whole logits and against themselves."""

import pytest
import torch

from hf_megapack.kernels.cross_entropy import HeadPart, linear_cross_entropy
from tests.helpers.cross_entropy import KINDS, TO_NEAREST, Case, case_of, check_terms, reference_terms, split_head
from tests.helpers.thread_ranks import run_on_threads

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ieee_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def gpu_case(kind, **options) -> Case:
    return Case(*(tensor.cuda() for tensor in case_of(kind, **options)))


def run(case, head, *, wants_grad=True):
    return linear_cross_entropy(case.hidden, head, case.labels, case.weights, wants_grad=wants_grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_slots", "num_tokens"), [(0, 75), (1, 75), (37, 1000), (130, 50_257)])
def test_the_whole_head(kind, dtype, num_slots, num_tokens):
    case = gpu_case(kind, num_slots=num_slots, num_tokens=num_tokens, dtype=dtype, seed=num_slots, hidden_size=64)
    head, expected = HeadPart(case.head, 0, num_tokens, None), reference_terms(case)
    check_terms(run(case, head), expected, case, conversion=TO_NEAREST)
    check_terms(run(case, head, wants_grad=False), expected, case, conversion=TO_NEAREST)


@pytest.mark.parametrize("kind", ["confident", "late_maximum"])
def test_many_chunks_of_a_large_vocabulary_with_padding(kind):
    case = gpu_case(kind, num_slots=1100, num_tokens=151_669, dtype=torch.bfloat16, seed=0, hidden_size=128)
    padding = torch.full((267, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    terms = run(case, HeadPart(torch.cat([case.head, padding]), 0, 151_669, None))
    check_terms(terms, reference_terms(case), case, conversion=TO_NEAREST)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_split_head(kind, dtype, num_ranks, monkeypatch):
    """Ranks are threads on one GPU and one stream."""
    case = gpu_case(kind, num_slots=37, num_tokens=5000, dtype=dtype, seed=num_ranks, hidden_size=64)
    parts = run_on_threads(num_ranks, lambda group: run(case, split_head(case, group, num_ranks)), monkeypatch)
    expected = reference_terms(case)
    for part in parts:
        check_terms(part._replace(grad_ND=None), expected, case, conversion=TO_NEAREST)
    whole = parts[0]._replace(grad_ND=sum(part.grad_ND.double() for part in parts))
    check_terms(whole, expected, case, conversion=TO_NEAREST)


def test_two_runs_agree_in_every_bit():
    case = gpu_case("late_maximum", num_slots=300, num_tokens=40_000, dtype=torch.bfloat16, seed=1, hidden_size=64)
    first, second = (run(case, HeadPart(case.head, 0, 40_000, None)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
