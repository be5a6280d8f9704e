"""Run the forward and backward passes of one optimizer update through Megatron-Core's schedule.

Rows are microbatches. The update's number of loss-bearing tokens is known beforehand, so every row's loss is divided by
it at once and gradients are plain sums: over rows here, over the ranks that hold the same weights afterwards.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from hf_megapack.batch import IGNORE_LABEL, PackedBatch, PackedRow, StepResult
from hf_megapack.errors import DataError
from hf_megapack.megatron.attention import TreeParams
from hf_megapack.megatron.chunks import ModelChunks
from hf_megapack.megatron.context import part_of_row, share_losses
from hf_megapack.megatron.host import compute_device, host_device, integers_on_device
from hf_megapack.megatron.loss import LossTerms
from hf_megapack.megatron.model import TreeGPTModel
from hf_megapack.megatron.parallel import ParallelLayout
from hf_megapack.megatron.recompute import RecomputePolicy
from hf_megapack.megatron.sequences import Sequences
from hf_megapack.megatron.shards import Split
from hf_megapack.packing import Alignment, RankLayout, sequence_boundaries

# Gradients that are summed at once, in elements: 256 MiB, or a single factor that is larger.
BUCKET_ELEMENTS = 2**26


def microbatch(
    row: PackedRow,
    layout: ParallelLayout,
    *,
    num_loss_tokens: int,
    is_dummy: bool,
    num_expert_places: int = 0,
    attention: Literal["tree", "thd"] = "tree",
) -> tuple[torch.Tensor, TreeParams]:
    """Move a row to the device.

    Args:
        row: The row.
        layout: Where this rank stands.
        num_loss_tokens: Loss-bearing tokens of the whole update.
        is_dummy: Whether the row counts for nothing.
        num_expert_places: As in TreeParams.
        attention: "thd" attends within each sequence of the row, "tree" along its tree.

    Returns:
        The tokens of this rank's slots, int64, and the parameters that travel with the microbatch.

    Raises:
        DataError: If the ranks that share rows, or their slots, cannot share this one, or if sequences of the row share
            a prefix and each is to be attended by itself.
    """
    _check_size(row.input_ids.size, layout, attention)
    cu_seqlens = sequence_boundaries(row.subtree_end) if attention == "thd" else None
    part = part_of_row(row.position_ids, row.subtree_end, layout, cu_seqlens)
    slots = part.slots
    is_learned = (row.labels != IGNORE_LABEL) & (row.loss_weights > 0) & (not is_dummy)
    computed, loss_share = share_losses(is_learned, part, layout)
    longest = int(row.position_ids.max()) + 1
    params = TreeParams(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=integers_on_device(part.position_ids),
        subtree_end=integers_on_device(part.subtree_end),
        loss_slots=integers_on_device(np.flatnonzero(is_learned[slots])),
        loss_labels=integers_on_device(row.labels[computed]),
        loss_counts=integers_on_device(row.loss_weights[computed]),
        loss_share=loss_share,
        loss_scale=1.0 / num_loss_tokens,
        share=part.share,
        num_expert_places=num_expert_places,
        sequences=None if cu_seqlens is None else Sequences.of(cu_seqlens, part.share),
    )
    return integers_on_device(row.input_ids[slots]), params


def _check_size(num_slots: int, layout: ParallelLayout, attention: Literal["tree", "thd"]) -> None:
    needed = Alignment.for_layout(
        tensor_parallel_size=layout.tensor_size if layout.sequence_parallel else 1,
        context_parallel_size=layout.context_size,
        attention=attention,
    )
    if num_slots % needed.packed_multiple:
        of_sequences = f"sequence_multiple {needed.sequence_multiple} and " if needed.sequence_multiple > 1 else ""
        raise DataError(
            f"A row of {num_slots} slots cannot be shared by {layout.context_size} context- and {layout.tensor_size} "
            f"tensor-parallel ranks; pack with {of_sequences}packed_multiple {needed.packed_multiple}, which "
            "MegaPackTrainer's own collator does."
        )


def _microbatches(
    batch: PackedBatch, layout: ParallelLayout, attention: Literal["tree", "thd"]
) -> Iterator[tuple[torch.Tensor, TreeParams]]:
    schedule = batch.schedule
    num_slots = np.array([row.input_ids.size for row in batch.rows])[schedule.row_index[layout.expert_data_ranks]]
    indices, are_dummies = schedule.row_index[layout.data_rank], schedule.is_dummy[layout.data_rank]
    for index, is_dummy, most in zip(indices, are_dummies, num_slots.max(axis=0), strict=True):
        yield microbatch(
            batch.rows[index],
            layout,
            num_loss_tokens=batch.num_loss_tokens,
            is_dummy=bool(is_dummy),
            num_expert_places=layout.num_local_slots(int(most)),
            attention=attention,
        )


def forward_row(model: TreeGPTModel, input_ids: torch.Tensor, params: TreeParams) -> LossTerms | torch.Tensor:
    """Run one row through one chunk of the model.

    Args:
        model: The chunk.
        input_ids: Tokens of this rank's slots.
        params: The row's description on the device.

    Returns:
        From the last chunk the row's loss terms, or its logits if `params` asks for them; else its hidden states.
    """
    return model(
        input_ids=input_ids[None],
        position_ids=params.local_positions[None],
        attention_mask=None,
        packed_seq_params=params,
    )


def _forward_step(microbatches: Iterator, model: TreeGPTModel, *, recompute: RecomputePolicy | None):
    input_ids, params = next(microbatches)
    if recompute is not None:
        recompute.apply(model, input_ids.numel())
    output = forward_row(model, input_ids, params)

    def divided_loss(terms: LossTerms):
        # The three-tuple makes the schedule sum losses as they are; its token count goes nowhere.
        return terms.loss, torch.zeros((), dtype=torch.int), torch.stack([term.detach() for term in terms])

    return output, divided_loss


def run_rows(
    model: ModelChunks,
    batch: PackedBatch,
    layout: ParallelLayout,
    recompute: RecomputePolicy | None,
    *,
    attention: Literal["tree", "thd"],
) -> torch.Tensor:
    """Run this rank's rows of an update; the host does not wait for them.

    Args:
        model: This rank's part of the model.
        batch: The update, the same on every rank.
        layout: Where this rank stands.
        recompute: What the backward pass computes again; None for no backward pass. Gradients are accumulated, not yet
            reduced over ranks.
        attention: As for `microbatch`.

    Returns:
        Sums over the rows, for `step_result`: loss, correct labels, entropy. float64, shape (3,).

    Raises:
        DataError: If the schedule is for other data- or pipeline-parallel sizes, a row cannot be shared, a token is not
            in the vocabulary, or nothing in the update is learned.
    """
    num_ranks, num_microbatches = batch.schedule.row_index.shape
    if num_ranks != layout.data_size:
        raise DataError(f"The update is scheduled for {num_ranks} data-parallel ranks; there are {layout.data_size}.")
    needed = RankLayout(
        pipeline_parallel_size=layout.pipeline_size, virtual_pipeline_parallel_size=layout.num_chunks
    ).num_local_microbatches(num_microbatches)
    if num_microbatches != needed:
        raise DataError(
            f"{num_microbatches} microbatches cannot be run by an interleaved pipeline of {layout.pipeline_size} "
            f"stages, which takes {needed}; pack for the pipeline's sizes, which MegaPackTrainer's own collator does."
        )
    if batch.num_loss_tokens < 1:
        raise DataError("The update has no loss-bearing token. Supervise at least one token of its examples.")
    # Every rank looks at the rows of all: one that raised alone would leave the others waiting.
    for row in batch.rows:
        _check_size(row.input_ids.size, layout, attention)
    largest = max(int(max(row.input_ids.max(), row.labels.max())) for row in batch.rows)
    if largest >= model[0].vocab_size:
        # Split over ranks, the embedding would take it for a token of another rank, and give zeros.
        raise DataError(
            f"The update holds token {largest}, but the model's vocab_size is {model[0].vocab_size}. Use the model's "
            "own tokenizer without tokens added to it, or a model whose embedding was resized for them."
        )
    wants_grad = recompute is not None
    if model.training is not wants_grad:
        model.train(wants_grad)
    if recompute is not None:
        recompute.begin_update(max(row.input_ids.size for row in batch.rows))
    iterators = [_microbatches(batch, layout, attention) for _ in model]
    with host_device(), torch.set_grad_enabled(wants_grad):
        terms = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, recompute=recompute),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(model),
            num_microbatches=num_microbatches,
            seq_length=max(len(row.input_ids) for row in batch.rows),
            micro_batch_size=1,
            forward_only=not wants_grad,
        )
    # Only the last stage of a pipeline has losses.
    none = torch.zeros(1, 3, device=compute_device())
    return (torch.stack(terms) if terms else none).double().sum(dim=0)


def step_result(totals: torch.Tensor, batch: PackedBatch, layout: ParallelLayout) -> StepResult:
    """Wait for the rows of an update and sum over all ranks.

    Args:
        totals: What `run_rows` returned; overwritten.
        batch: The update.
        layout: Where this rank stands.

    Returns:
        The update's result, the same on every rank.
    """
    for group in (layout.replica_group, layout.pipeline_group):
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
    loss, num_correct, entropy = totals.tolist()
    return StepResult(loss=loss, num_loss_tokens=batch.num_loss_tokens, num_correct=round(num_correct), entropy=entropy)


def reduce_gradients(
    parameters: Mapping[str, torch.nn.Parameter], splits: Mapping[str, Split], layout: ParallelLayout
) -> None:
    """Sum gradients over the ranks that each computed a part of them.

    With sequence parallelism a factor that every tensor-parallel rank holds has seen that rank's slots only. Every
    factor has seen only the rows, or parts of rows, of its own data- and context-parallel rank. An expert has seen what
    the ranks that share the experts sent it, but not what others sent to its copies.

    Args:
        parameters: The factors of this rank; one without a gradient counts as zero.
        splits: Over which ranks each is spread.
        layout: Where this rank stands.
    """
    dense = {key: p for key, p in parameters.items() if splits[key].axis == "tensor"}
    if layout.sequence_parallel:
        _sum_over([p for key, p in dense.items() if splits[key].dim is None], layout.tensor_group)
    _sum_over(list(dense.values()), layout.replica_group)
    _sum_over([p for key, p in parameters.items() if key not in dense], layout.expert_replica_group)


def _sum_over(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, in flat buffers of a limited size; they are parts of these afterwards."""
    if group.size() == 1:
        return
    bucket, size = [], 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and size + parameter.numel() > BUCKET_ELEMENTS:
            _sum_bucket(bucket, group)
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
