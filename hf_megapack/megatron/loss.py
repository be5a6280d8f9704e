"""Cross-entropy of loss-bearing slots against a frozen language-model head.

The head is frozen, so one pass over the vocabulary gives both the loss and the gradient of the hidden states; logits
exist for a few slots at a time only.

Shapes: N loss-bearing slots, D hidden size, V vocabulary (this rank's part where it is split).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

# Logits held at once, in float32 elements: 64 MiB.
LOGITS_BUDGET = 2**24


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
    def forward(ctx, hidden_ND, head_VD, labels_N, counts_N, scale, group):  # noqa: PLR0913 (frozen_head_loss's own)
        accumulate = torch.promote_types(hidden_ND.dtype, torch.float32)
        sums = torch.zeros(3, dtype=accumulate, device=hidden_ND.device)
        wants_grad = ctx.needs_input_grad[0]
        grad_ND = torch.empty_like(hidden_ND) if wants_grad else None
        vocab_size = head_VD.shape[0]
        first_token = 0 if group is None else group.rank() * vocab_size
        rows = max(1, LOGITS_BUDGET // vocab_size)
        for start in range(0, hidden_ND.shape[0], rows):
            part = slice(start, start + rows)
            label_N, count_N = labels_N[part] - first_token, counts_N[part].to(accumulate)
            weight_N = count_N * scale
            is_mine_N = (label_N >= 0) & (label_N < vocab_size)
            label_N1 = torch.where(is_mine_N, label_N, 0)[:, None]
            logits_NV = (hidden_ND[part] @ head_VD.T).to(accumulate)
            highest_N = logits_NV.amax(dim=1)
            if group is not None:
                dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
            logits_NV -= highest_N[:, None]
            probability_NV = logits_NV.exp()
            partial_3N = torch.stack(
                [
                    probability_NV.sum(dim=1),
                    torch.einsum("nv,nv->n", probability_NV, logits_NV),
                    logits_NV.gather(1, label_N1).squeeze(1) * is_mine_N,
                ]
            )
            if group is not None:
                dist.all_reduce(partial_3N, group=group)
            normaliser_N, mean_logit_N, label_logit_N = partial_3N
            log_normaliser_N = normaliser_N.log()
            nll_N = log_normaliser_N - label_logit_N
            entropy_N = log_normaliser_N - mean_logit_N / normaliser_N
            # Logits are relative to the highest one.
            is_correct_N = label_logit_N == 0
            sums += torch.stack([weight_N @ nll_N, (count_N * is_correct_N).sum(), weight_N @ entropy_N])
            if wants_grad:
                probability_NV /= normaliser_N[:, None]
                probability_NV.scatter_add_(1, label_N1, -is_mine_N[:, None].to(accumulate))
                grad_ND[part] = (probability_NV * weight_N[:, None]).to(head_VD.dtype) @ head_VD
        ctx.save_for_backward(*([grad_ND] if wants_grad else []))
        loss, num_correct, entropy = sums.unbind()
        ctx.mark_non_differentiable(num_correct, entropy)
        return loss, num_correct, entropy

    @staticmethod
    def backward(ctx, grad_loss, _grad_correct, _grad_entropy):
        (grad_ND,) = ctx.saved_tensors
        return grad_ND * grad_loss.to(grad_ND.dtype), None, None, None, None, None


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
        The three sums, the same on every rank of the group. Logits have the hidden states' dtype; they are summed and
        normalised in float32 or wider. The gradient of `hidden_ND` is that of this rank's part of the vocabulary:
        the ranks' gradients add up to the whole.

    Raises:
        ValueError: If the head wants a gradient, which this function does not compute.
    """
    if head_VD.requires_grad:
        raise ValueError("frozen_head_loss computes no gradient for the head; its requires_grad must be False.")
    return LossTerms(*_FrozenHeadLoss.apply(hidden_ND, head_VD, labels_N, counts_N, scale, group))
