"""Cross-entropy of loss-bearing slots against a frozen language-model head, as one node of autograd's graph.

Shapes: N loss-bearing slots, D hidden size, V vocabulary (this rank's part where it is split).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from hf_megapack.kernels.cross_entropy import HeadPart, linear_cross_entropy


class LossTerms(NamedTuple):
    """Sums over the loss-bearing slots of one row, float32 scalars.

    Attributes:
        loss: Sum of `counts * scale` times the token losses, in nats; only this term carries a gradient.
        num_correct: Sum of `counts` over the slots whose label had the highest logit, or shared it with others.
        entropy: Sum of `counts * scale` times the entropies of the predicted distributions, in nats.
    """

    loss: torch.Tensor
    num_correct: torch.Tensor
    entropy: torch.Tensor


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, head, labels_N, counts_N, scale):
        weights_N = counts_N.to(torch.promote_types(hidden_ND.dtype, torch.float32)) * scale
        terms = linear_cross_entropy(hidden_ND, head, labels_N, weights_N, wants_grad=ctx.needs_input_grad[0])
        grad_ND = terms.grad_ND
        if grad_ND is not None and head.group is not None:
            dist.all_reduce(grad_ND, group=head.group)
            grad_ND = grad_ND.to(hidden_ND.dtype)
        ctx.save_for_backward(*([] if grad_ND is None else [grad_ND]))
        num_correct = (counts_N * terms.is_correct_N).sum().to(weights_N.dtype)
        entropy = weights_N @ terms.entropy_N
        ctx.mark_non_differentiable(num_correct, entropy)
        return weights_N @ terms.nll_N, num_correct, entropy

    @staticmethod
    def backward(ctx, grad_loss, _grad_correct, _grad_entropy):
        (grad_ND,) = ctx.saved_tensors
        return grad_ND * grad_loss.to(grad_ND.dtype), None, None, None, None


def frozen_head_loss(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    labels_N: torch.Tensor,
    counts_N: torch.Tensor,
    scale: float,
    *,
    group: dist.ProcessGroup | None = None,
) -> LossTerms:
    """Return the weighted cross-entropy of the given slots.

    Args:
        hidden_ND: Final hidden states of the loss-bearing slots. Floating, shape (N, D); N may be 0.
        head_VD: Frozen head. Same dtype, shape (V, D).
        labels_N: Token that each slot predicts. int64, shape (N,).
        counts_N: Number of examples that learn each slot's label. Integer, shape (N,).
        scale: One over the loss-bearing tokens of the whole update.
        group: The ranks between which the vocabulary is split evenly, in their order; None when the head is whole.
            Every rank passes the same slots.

    Returns:
        The three sums, the same on every rank of the group, in float32 or wider; `linear_cross_entropy` says in which
        dtype the logits are. The gradient of `hidden_ND` is that of the whole vocabulary on every rank, summed in
        float32 or wider and rounded once.

    Raises:
        ValueError: If the head wants a gradient, which this function does not compute.
    """
    if head_VD.requires_grad:
        raise ValueError("frozen_head_loss computes no gradient for the head; its requires_grad must be False.")
    vocab_size = head_VD.shape[0]
    head = HeadPart(head_VD, 0 if group is None else group.rank() * vocab_size, vocab_size, group)
    return LossTerms(*_FrozenHeadLoss.apply(hidden_ND, head, labels_N, counts_N, scale))
