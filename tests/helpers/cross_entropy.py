"""Slots and heads whose logits are hard to sum, and their terms in float64 from whole logits."""

from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from hf_megapack.kernels.cross_entropy import HeadPart, SlotTerms

KINDS = ("plain", "ties", "large", "far_below", "masked", "late_maximum", "confident")
# Largest error of float32 terms, per unit of the slot's largest logit.
TERM_BOUND = 2e-6
# Largest relative error of a conversion to bfloat16: to nearest on a GPU, cut off in Triton's interpreter.
TO_NEAREST, CUT_OFF = 2**-8, 2**-7


class Case(NamedTuple):
    """One call: `hidden`, `head`, `labels`, `weights`."""

    hidden: torch.Tensor
    head: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def case_of(
    kind: str, *, num_slots: int, num_tokens: int, dtype: torch.dtype, seed: int, hidden_size: int = 16
) -> Case:
    """Return a case; the kinds are ways in which logits lie.

    Column 0 of the hidden states is 1, so that element 0 of a head row moves its token's logit.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_slots, hidden_size, generator=generator)
    head = torch.randn(num_tokens, hidden_size, generator=generator)
    labels = torch.randint(0, num_tokens, (num_slots,), generator=generator)
    hidden[:, 0] = 1.0
    if kind == "ties":
        # Small whole numbers: equal logits stay equal in whichever order a product sums.
        hidden, head = hidden.round(), head.round()
        head = head[torch.arange(num_tokens) % ((num_tokens + 1) // 2)]
        if num_slots:
            labels[::2] = (hidden @ head.T).argmax(dim=1)[::2]
    elif kind == "large":
        head *= 64
    elif kind == "far_below":
        head[:, 0] -= 2048
    elif kind == "masked":
        # Two such products overflow to minus infinity in float32.
        hidden[:, 1] = 1.0
        is_masked = torch.rand(num_tokens, generator=generator) < 0.5
        is_masked[labels] = False
        head[is_masked, :2] = -3e38
    elif kind == "late_maximum":
        head[:, 0] += torch.linspace(-300, 0, num_tokens)
    elif kind == "confident":
        hidden += 2 * head[labels]
        hidden[:, 0] = 1.0
    weights = torch.randint(1, 4, (num_slots,), generator=generator).float() / 40
    return Case(hidden.to(dtype), head.to(dtype), labels, weights)


def split_head(case: Case, group, num_ranks: int) -> HeadPart:
    """Return one rank's part of the case's head, padded to an odd number of rows that the ranks share evenly.

    With more than two ranks the last one holds padding alone. Padding is NaN.
    """
    num_tokens, hidden_size = case.head.shape
    rows = -(-num_tokens // min(num_ranks, 2)) + 3
    padding = torch.full((rows * num_ranks - num_tokens, hidden_size), torch.nan, dtype=case.head.dtype)
    padded = torch.cat([case.head, padding.to(case.head.device)])
    first = group.rank() * rows
    return HeadPart(padded[first : first + rows], first, min(max(num_tokens - first, 0), rows), group)


def _logit_gradient(probability: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the probabilities with minus the sum of the others for the label: `p - 1` would lose digits in float64."""
    others = probability.scatter(1, labels[:, None], 0)
    return others.scatter(1, labels[:, None], -others.sum(dim=1, keepdim=True))


def reference_terms(case: Case, *, logits_dtype: torch.dtype = torch.float64) -> SlotTerms:
    """Return the terms in float64, of logits rounded to `logits_dtype`."""
    hidden, head = case.hidden.double(), case.head.double()
    logits = (hidden @ head.T).to(logits_dtype).double()
    log_probability = logits.log_softmax(dim=1)
    probability = log_probability.exp()
    entropy = -(probability * log_probability).where(probability > 0, 0).sum(dim=1)
    label_logit = logits.gather(1, case.labels[:, None]).squeeze(1)
    grad = (_logit_gradient(probability, case.labels) * case.weights[:, None].double()) @ head
    nll = cross_entropy(logits, case.labels, reduction="none")
    is_correct = label_logit == logits.amax(dim=1) if len(label_logit) else label_logit.bool()
    return SlotTerms(nll, entropy, is_correct, grad)


def check_terms(terms: SlotTerms, expected: SlotTerms, case: Case, *, conversion: float) -> None:
    """Assert that the terms are the expected ones; a gradient of None is not compared.

    In bfloat16 an exponential is converted when it is written and perhaps again when its row's reference is raised
    (`conversion` each); then the gradient is rounded to nearest. All are relative to the slot's sum of head rows
    without cancellation.
    """
    logits = case.hidden.double() @ case.head.double().T
    scale = logits.where(logits > -1e30, 0).abs().amax(dim=1).clamp(min=1)
    assert ((terms.nll_N.double() - expected.nll_N).abs() <= TERM_BOUND * scale).all()
    assert ((terms.entropy_N.double() - expected.entropy_N).abs() <= TERM_BOUND * scale).all()
    assert terms.is_correct_N.tolist() == expected.is_correct_N.tolist()
    if terms.grad_ND is None:
        return
    # A logit's rounding moves its probability by as much, hence scale.
    reach = _logit_gradient(logits.softmax(dim=1), case.labels).abs()
    size = case.weights.double() * (reach @ case.head.double().norm(dim=1))
    rounding = 2 * conversion + TO_NEAREST if case.hidden.dtype == torch.bfloat16 else 0.0
    bound = (rounding + TERM_BOUND * scale) * size + 1e-30
    error = (terms.grad_ND.double() - expected.grad_ND).norm(dim=1)
    assert (error <= bound).all(), (error / bound).tolist()
