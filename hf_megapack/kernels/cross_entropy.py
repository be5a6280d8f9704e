"""Cross-entropy of a linear head, slot by slot, with the gradient of its input; logits exist for a few slots at a time.

The head is frozen, so one pass over the vocabulary gives the losses and the hidden states' gradient together. On a GPU
Triton kernels do the part between the two matrix products; elsewhere, and for other dtypes than bfloat16 and float32,
the plain PyTorch below does.

Shapes: N slots, D hidden size, V columns of the head on this rank.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

# Logits that the plain version holds at once: 64 MiB of float32.
PLAIN_LOGITS = 2**24
FUSED_DTYPES = (torch.bfloat16, torch.float32)


class HeadPart(NamedTuple):
    """The rows of a frozen head that one rank holds.

    Attributes:
        weight_VD: One row per token. Floating, shape (V, D).
        first_token: The token of the first row.
        num_valid_columns: Rows that are tokens, 0 to V; those after them pad the vocabulary and take no part.
        group: The ranks that hold the other rows; None when this is the whole head. Every rank passes the same slots.
    """

    weight_VD: torch.Tensor
    first_token: int
    num_valid_columns: int
    group: dist.ProcessGroup | None


class SlotTerms(NamedTuple):
    """What one pass over the vocabulary says about each slot.

    Attributes:
        nll_N: Negative log-probability of the label in nats; infinite for a label that no rank holds. float32 or wider.
        entropy_N: Entropy of the predicted distribution in nats. Same dtype.
        is_correct_N: Whether the label had the highest logit, or shared it with others. bool.
        grad_ND: Gradient of `sum(weights_N * nll_N)` by the hidden states, in their dtype; None if not asked for. Where
            the head is split it is this rank's part, in float32 or wider: the ranks' parts add up to the whole.
    """

    nll_N: torch.Tensor
    entropy_N: torch.Tensor
    is_correct_N: torch.Tensor
    grad_ND: torch.Tensor | None


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    head: HeadPart,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    wants_grad: bool,
) -> SlotTerms:
    """Return each slot's terms and the gradient of their weighted sum.

    Args:
        hidden_ND: Input of the head, shape (N, D); N may be 0. The head's dtype.
        head: This rank's part of the head.
        labels_N: Token that each slot predicts. int64, shape (N,).
        weights_N: Factor of each slot's loss in the sum that `grad_ND` belongs to. float32 or wider, shape (N,).
        wants_grad: Whether to compute the gradient.

    Returns:
        The terms; all but the gradient are the same on every rank of the group. On a GPU the logits of bfloat16 inputs
        are float32 (the product is not rounded to bfloat16); elsewhere they have the inputs' dtype. Both are summed and
        normalised in float32 or wider, and the gradient of bfloat16 logits is rounded once before its product.
    """
    if hidden_ND.is_cuda and hidden_ND.dtype in FUSED_DTYPES:
        # Imports Triton.
        from hf_megapack.kernels.fused_cross_entropy import fused_linear_cross_entropy

        return fused_linear_cross_entropy(hidden_ND, head, labels_N, weights_N, wants_grad=wants_grad)
    return plain_linear_cross_entropy(hidden_ND, head, labels_N, weights_N, wants_grad=wants_grad)


def empty_terms(hidden_ND: torch.Tensor, head: HeadPart, *, wants_grad: bool) -> SlotTerms:
    """Return unwritten terms for the given slots."""
    num_slots, accumulate = hidden_ND.shape[0], torch.promote_types(hidden_ND.dtype, torch.float32)
    grad_dtype = hidden_ND.dtype if head.group is None else accumulate
    return SlotTerms(
        hidden_ND.new_empty(num_slots, dtype=accumulate),
        hidden_ND.new_empty(num_slots, dtype=accumulate),
        hidden_ND.new_empty(num_slots, dtype=torch.bool),
        hidden_ND.new_empty(hidden_ND.shape, dtype=grad_dtype) if wants_grad else None,
    )


def write_terms(
    terms: SlotTerms,
    part: slice,
    relative_N: torch.Tensor,
    others_N: torch.Tensor,
    weighted_others_N: torch.Tensor,
) -> torch.Tensor:
    """Write what the sums over all columns of all ranks say about some slots, and return their normalisers.

    Args:
        terms: Where the terms go; the gradient is left alone.
        part: The slots.
        relative_N: The label's logit less the highest one. float32 or wider, shape (N,).
        others_N: Sum of exp(logit - highest) over all tokens but the label. Same dtype and shape.
        weighted_others_N: Sum of exp(logit - highest) * (logit - highest) over these. Same dtype and shape.

    Returns:
        Sum of exp(logit - highest) over all tokens. Same dtype and shape.
    """
    label_exp_N = relative_N.exp()
    normaliser_N = others_N + label_exp_N
    # A logit of minus infinity adds nothing to the entropy.
    weighted_logits_N = weighted_others_N + (label_exp_N * relative_N).where(label_exp_N != 0, 0)
    terms.nll_N[part] = normaliser_N.log() - relative_N
    terms.entropy_N[part] = normaliser_N.log() - weighted_logits_N / normaliser_N
    terms.is_correct_N[part] = relative_N == 0
    return normaliser_N


def plain_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    head: HeadPart,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    wants_grad: bool,
) -> SlotTerms:
    """Do what `linear_cross_entropy` says in plain PyTorch, on any device and in any floating dtype."""
    terms = empty_terms(hidden_ND, head, wants_grad=wants_grad)
    accumulate = terms.nll_N.dtype
    num_valid = head.num_valid_columns
    # In the gradient's type, of which a split head's parts are added.
    weight_VD = head.weight_VD[:num_valid].to(accumulate if head.group is not None else hidden_ND.dtype)
    rows = max(1, PLAIN_LOGITS // head.weight_VD.shape[0])
    for start in range(0, hidden_ND.shape[0], rows):
        part = slice(start, start + rows)
        label_N = labels_N[part] - head.first_token
        is_mine_N = (label_N >= 0) & (label_N < num_valid)
        label_N1 = torch.where(is_mine_N, label_N, 0)[:, None]
        logits_NV = (hidden_ND[part] @ head.weight_VD.T).to(accumulate)
        logits_NV[:, num_valid:] = -torch.inf
        label_logit_N = torch.where(is_mine_N, logits_NV.gather(1, label_N1).squeeze(1), -torch.inf)
        highest_2N = torch.stack([logits_NV.amax(dim=1), label_logit_N])
        if head.group is not None:
            dist.all_reduce(highest_2N, dist.ReduceOp.MAX, group=head.group)
        highest_N, label_logit_N = highest_2N
        logits_NV -= highest_N[:, None]
        exps_NV = logits_NV.exp()
        # Without the label's, so that its p - 1, minus the sum of the others, loses nothing where p is almost 1.
        exps_NV.scatter_(1, label_N1, exps_NV.gather(1, label_N1) * ~is_mine_N[:, None])
        # A logit of minus infinity adds nothing to the entropy.
        logits_NV.masked_fill_(exps_NV == 0, 0)
        others_2N = torch.stack([exps_NV.sum(dim=1), torch.einsum("nv,nv->n", exps_NV, logits_NV)])
        if head.group is not None:
            dist.all_reduce(others_2N, group=head.group)
        normaliser_N = write_terms(terms, part, label_logit_N - highest_N, *others_2N)
        if terms.grad_ND is not None:
            exps_NV.scatter_add_(1, label_N1, -(is_mine_N * others_2N[0])[:, None])
            exps_NV *= (weights_N[part] / normaliser_N)[:, None]
            terms.grad_ND[part] = exps_NV[:, :num_valid].to(hidden_ND.dtype).to(weight_VD.dtype) @ weight_VD
    return terms
