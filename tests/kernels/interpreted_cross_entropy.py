"""The Triton kernels of the linear cross-entropy in Triton's interpreter, against float64 on whole logits.

test_cross_entropy.py runs this file in a process of its own: Triton reads TRITON_INTERPRET when it is first imported.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from hf_megapack.kernels import cross_entropy, cross_entropy_triton, fused_cross_entropy
from hf_megapack.kernels.cross_entropy import HeadPart
from hf_megapack.kernels.fused_cross_entropy import Plan, fused_linear_cross_entropy, plan_chunks
from tests.helpers.cross_entropy import CUT_OFF, KINDS, case_of, check_terms, reference_terms, split_head
from tests.helpers.thread_ranks import run_on_threads

# numpy, which interprets, warns of what the kernels compute and do not select.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def one_launch_at_a_time(monkeypatch):
    """The interpreter patches triton.language while a kernel runs, so ranks that are threads take turns."""
    turn = threading.Lock()
    for name in ("exponentiate_rows", "settle_rows"):
        launch = getattr(cross_entropy_triton, name)

        def in_turn(*args, launch=launch, **kwargs):
            with turn:
                return launch(*args, **kwargs)

        monkeypatch.setattr(fused_cross_entropy, name, in_turn)


def run_fused(case, head, *, plan, wants_grad=True):
    return fused_linear_cross_entropy(case.hidden, head, case.labels, case.weights, wants_grad=wants_grad, plan=plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "logits_dtype"), [("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("num_slots", [0, 1, 5])
def test_the_whole_head(kind, dtype, logits_dtype, num_slots):
    """Blocks of 16 columns in chunks of 48, the last ones partial, and of two slots at a time the last one too."""
    case = case_of(kind, num_slots=num_slots, num_tokens=75, dtype=getattr(torch, dtype), seed=num_slots)
    plan = Plan(2, 48, getattr(torch, logits_dtype), block=16, num_warps=1)
    expected = reference_terms(case)
    check_terms(run_fused(case, HeadPart(case.head, 0, 75, None), plan=plan), expected, case, conversion=CUT_OFF)
    no_grad = run_fused(case, HeadPart(case.head, 0, 75, None), plan=plan, wants_grad=False)
    assert no_grad.grad_ND is None
    check_terms(no_grad, expected, case, conversion=CUT_OFF)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden_size", [16, 64])
@pytest.mark.usefixtures("one_launch_at_a_time")
def test_a_split_head(kind, num_ranks, dtype, hidden_size, monkeypatch):
    """The last rank of three holds padding alone, and the one before it some; with 64 logits lie 100 and more apart."""
    sizes = {"num_slots": 5, "num_tokens": 75, "hidden_size": hidden_size}
    case = case_of(kind, **sizes, dtype=getattr(torch, dtype), seed=num_ranks)
    plan = Plan(3, 32, torch.float32, block=16, num_warps=1)

    def run(group):
        return run_fused(case, split_head(case, group, num_ranks), plan=plan)

    parts = run_on_threads(num_ranks, run, monkeypatch)
    expected = reference_terms(case)
    for part in parts:
        check_terms(part._replace(grad_ND=None), expected, case, conversion=CUT_OFF)
    whole = parts[0]._replace(grad_ND=sum(part.grad_ND.double() for part in parts))
    check_terms(whole, expected, case, conversion=CUT_OFF)


@settings(max_examples=25, deadline=None)
@given(
    num_slots=st.integers(1, 6),
    num_tokens=st.integers(2, 140),
    padding=st.integers(0, 70),
    rows=st.integers(1, 4),
    columns=st.integers(1, 150),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
)
def test_any_sizes(num_slots, num_tokens, padding, rows, columns, kind, seed):
    case = case_of(kind, num_slots=num_slots, num_tokens=num_tokens, dtype=torch.float32, seed=seed)
    poison = torch.full((padding, case.head.shape[1]), torch.nan)
    head = HeadPart(torch.cat([case.head, poison]), 0, num_tokens, None)
    terms = run_fused(case, head, plan=Plan(rows, columns, torch.float32, 16, 1))
    check_terms(terms, reference_terms(case), case, conversion=CUT_OFF)


def test_bfloat16_logits_are_those_of_a_rounded_product():
    """In place and as narrow as the exponentials; against the rounded logits the result is exact all the same."""
    case = case_of("plain", num_slots=7, num_tokens=75, dtype=torch.bfloat16, seed=3)
    terms = run_fused(case, HeadPart(case.head, 0, 75, None), plan=Plan(3, 32, torch.bfloat16, 16, 1))
    check_terms(terms, reference_terms(case, logits_dtype=torch.bfloat16), case, conversion=CUT_OFF)


def test_a_label_that_nobody_holds_has_infinite_loss():
    case = case_of("plain", num_slots=3, num_tokens=75, dtype=torch.float32, seed=4)
    case.labels[1] = 75
    head = HeadPart(case.head, 0, 75, None)
    plan = Plan(3, 32, torch.float32, block=16, num_warps=1)
    for function in (fused_linear_cross_entropy, cross_entropy.plain_linear_cross_entropy):
        options = {"plan": plan} if function is fused_linear_cross_entropy else {}
        terms = function(case.hidden, head, case.labels, case.weights, wants_grad=True, **options)
        assert terms.nll_N.isinf().tolist() == [False, True, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 40])
def test_a_logit_that_is_no_number_is_not_hidden(value, column):
    case = case_of("plain", num_slots=3, num_tokens=75, dtype=torch.float32, seed=5)
    case.labels[:] = 7
    case.head[column, 0] = value
    terms = run_fused(case, HeadPart(case.head, 0, 75, None), plan=Plan(3, 32, torch.float32, 16, 1))
    finite = terms.nll_N.isfinite() & terms.grad_ND.isfinite().all(dim=1)
    assert not finite.any()


@settings(max_examples=200)
@given(
    num_slots=st.integers(0, 40_000), num_columns=st.integers(0, 300_000), num_processors=st.sampled_from((1, 84, 132))
)
def test_plans_fill_the_processors_and_leave_no_small_rest(num_slots, num_columns, num_processors):
    plan = plan_chunks(num_slots, num_columns, num_processors)
    tile_rows, tile_columns = fused_cross_entropy.TILE_ROWS, fused_cross_entropy.TILE_COLUMNS
    assert plan.rows % tile_rows == plan.columns % tile_columns == 0
    assert (plan.rows // tile_rows) * (plan.columns // tile_columns) % num_processors == 0
    assert plan.rows <= fused_cross_entropy.MOST_ROWS
    assert plan.rows * plan.columns <= fused_cross_entropy.MOST_LOGITS
    unit = tile_columns * num_processors
    for size, part, most_over in ((num_slots, plan.rows, tile_rows), (num_columns, plan.columns, unit)):
        assert part - size // max(1, -(-size // part)) <= most_over


def test_the_plan_of_a_large_vocabulary():
    plan = plan_chunks(16_384, 151_936, 132)
    assert (plan.rows, plan.columns, plan.logits_dtype) == (2048, 12_672, torch.float32)
