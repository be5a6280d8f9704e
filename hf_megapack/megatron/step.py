"""Run the forward and backward passes of one optimizer update through Megatron-Core's schedule.

Rows are microbatches. The update's number of loss-bearing tokens is known beforehand, so every row's loss is divided by
it at once and gradients are plain sums: over rows here, over data-parallel ranks afterwards.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from hf_megapack.batch import IGNORE_LABEL, PackedBatch, PackedRow, StepResult
from hf_megapack.errors import DataError
from hf_megapack.megatron.attention import TreeParams
from hf_megapack.megatron.host import compute_device, host_device
from hf_megapack.megatron.loss import LossTerms
from hf_megapack.megatron.model import TreeGPTModel
from hf_megapack.megatron.parallel import ParallelLayout


def tree_params(row: PackedRow, *, num_loss_tokens: int, is_dummy: bool, wants_logits: bool = False) -> TreeParams:
    """Move a row's description to the device.

    Args:
        row: The row.
        num_loss_tokens: Loss-bearing tokens of the whole update.
        is_dummy: Whether the row counts for nothing.
        wants_logits: Whether logits are asked for instead of the loss.

    Returns:
        The parameters that travel with the microbatch.
    """
    slots = np.flatnonzero((row.labels != IGNORE_LABEL) & (row.loss_weights > 0))
    if is_dummy:
        slots = slots[:0]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(compute_device(), non_blocking=True)

    longest = int(row.position_ids.max()) + 1
    return TreeParams(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=on_device(row.position_ids),
        subtree_end=on_device(row.subtree_end),
        loss_slots=on_device(slots),
        loss_labels=on_device(row.labels[slots]),
        loss_counts=on_device(row.loss_weights[slots]),
        loss_scale=1.0 / num_loss_tokens,
        wants_logits=wants_logits,
    )


def _microbatches(batch: PackedBatch, data_rank: int) -> Iterator[tuple[PackedRow, TreeParams]]:
    schedule = batch.schedule
    for index, is_dummy in zip(schedule.row_index[data_rank], schedule.is_dummy[data_rank], strict=True):
        row = batch.rows[index]
        yield row, tree_params(row, num_loss_tokens=batch.num_loss_tokens, is_dummy=bool(is_dummy))


def forward_row(model: TreeGPTModel, row: PackedRow, params: TreeParams) -> LossTerms | torch.Tensor:
    """Run one row through the model.

    Args:
        model: The model.
        row: The row.
        params: Its description on the device.

    Returns:
        The row's loss terms, or its logits of shape (num_slots, vocab_size) if `params` asks for them.
    """
    input_ids = torch.from_numpy(row.input_ids.astype(np.int64)).to(compute_device(), non_blocking=True)
    return model(
        input_ids=input_ids[None],
        position_ids=params.position_ids[None],
        attention_mask=None,
        packed_seq_params=params,
    )


def _forward_step(microbatches: Iterator, model: TreeGPTModel):
    terms = forward_row(model, *next(microbatches))

    def divided_loss(terms: LossTerms):
        # The three-tuple makes the schedule sum losses as they are; its token count goes nowhere.
        return terms.loss, torch.zeros((), dtype=torch.int), torch.stack([term.detach() for term in terms])

    return terms, divided_loss


def run_batch(model: TreeGPTModel, batch: PackedBatch, layout: ParallelLayout, *, wants_grad: bool) -> StepResult:
    """Run this rank's rows of an update and reduce its loss over all ranks.

    Args:
        model: The model.
        batch: The update, the same on every rank.
        layout: Where this rank stands.
        wants_grad: Whether gradients are accumulated (not yet reduced over ranks).

    Returns:
        The update's result, the same on every rank.

    Raises:
        DataError: If the schedule is for another number of data-parallel ranks, or nothing in the update is learned.
    """
    num_ranks, num_microbatches = batch.schedule.row_index.shape
    if num_ranks != layout.data_size:
        raise DataError(f"The update is scheduled for {num_ranks} data-parallel ranks; there are {layout.data_size}.")
    if batch.num_loss_tokens < 1:
        raise DataError("The update has no loss-bearing token. Supervise at least one token of its examples.")
    model.train(wants_grad)
    with host_device(), torch.set_grad_enabled(wants_grad):
        terms = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_microbatches(batch, layout.data_rank),
            model=[model],
            num_microbatches=num_microbatches,
            seq_length=max(len(row.input_ids) for row in batch.rows),
            micro_batch_size=1,
            forward_only=not wants_grad,
        )
    totals = torch.stack(terms).double().sum(dim=0)
    if layout.data_size > 1:
        dist.all_reduce(totals, group=layout.data_group)
    loss, num_correct, entropy = totals.tolist()
    return StepResult(loss=loss, num_loss_tokens=batch.num_loss_tokens, num_correct=round(num_correct), entropy=entropy)


def reduce_gradients(parameters: Iterable[torch.nn.Parameter], layout: ParallelLayout) -> None:
    """Sum gradients over the data-parallel ranks, in one flat buffer.

    Args:
        parameters: The factors of this rank; one without a gradient counts as zero.
        layout: Where this rank stands.
    """
    if layout.data_size == 1:
        return
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat, group=layout.data_group)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))
