"""Bring every slot to the experts that the router chose, and its results back: the same sums in the same order.

Megatron-Core's own dispatchers add a slot's results in whatever order a GPU's atomics take, and in the activations'
type. Here rows are only gathered: a slot's results are summed in float32 in the order of its experts, forward and
backward, so an update repeats to the bit. Without expert parallelism the host never waits for the device; with it once
per layer, for the sizes of the all-to-all. `gather` is the other way between ranks, for those who ask for it.

Shapes: T slots of this rank, E experts of the model, K experts of a slot, D hidden size, N = T * K rows that this rank
sends, M rows that it receives.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from hf_megapack.kernels.experts import sum_rows
from hf_megapack.megatron.gather import GatheringDispatcher
from hf_megapack.megatron.handoff import keep_transfers_eager
from hf_megapack.megatron.lora_products import Origin, keep_origin, origin_of


class RowPlan(NamedTuple):
    """Which slot each row comes from.

    Attributes:
        slot_of_row: int64, shape (N,).
        rows_of_slot: The rows that come from each slot. int64, shape (T, K).
    """

    slot_of_row: torch.Tensor
    rows_of_slot: torch.Tensor


def plan_rows(routing_TE: torch.Tensor, top_k: int) -> tuple[RowPlan, torch.Tensor]:
    """Lay out one row for each slot and chosen expert, sorted by expert and then by slot. No size depends on the data.

    Args:
        routing_TE: Whether a slot goes to an expert; K experts for each slot. bool, shape (T, E).
        top_k: K.

    Returns:
        The plan, and where each row's pair stands among all pairs, expert by expert. int64, shape (N,).

    Example:
        >>> plan, pairs = plan_rows(torch.tensor([[True, False, True], [True, True, False]]), 2)
        >>> plan.slot_of_row.tolist(), plan.rows_of_slot.tolist(), pairs.tolist()
        ([0, 1, 1, 0], [[0, 3], [1, 2]], [0, 1, 3, 4])
    """
    num_slots, num_experts = routing_TE.shape
    num_rows = num_slots * top_k
    is_chosen = routing_TE.T.reshape(-1)
    row_of_pair = is_chosen.cumsum(0) - 1
    # What is not chosen is written behind the end.
    pairs = torch.arange(num_experts * num_slots, device=routing_TE.device)
    pair_of_row = pairs.new_empty(num_rows + 1).scatter_(0, row_of_pair.where(is_chosen, num_rows), pairs)[:num_rows]
    place_TE = (routing_TE.cumsum(1) - 1).where(routing_TE, top_k)
    rows_TE = row_of_pair.view(num_experts, num_slots).T
    rows_of_slot = pairs.new_empty(num_slots, top_k + 1).scatter_(1, place_TE, rows_TE)[:, :top_k].contiguous()
    return RowPlan(pair_of_row % num_slots, rows_of_slot), pair_of_row


class _TakeRows(torch.autograd.Function):
    """Each row is a copy of its slot."""

    @staticmethod
    def forward(ctx, slots_TD, plan):
        ctx.plan = plan
        return slots_TD.index_select(0, plan.slot_of_row)

    @staticmethod
    def backward(ctx, grad_ND):
        return sum_rows(grad_ND.contiguous(), ctx.plan.rows_of_slot), None


class _SumRows(torch.autograd.Function):
    """Each slot is the sum of its rows."""

    @staticmethod
    def forward(ctx, rows_ND, plan):
        ctx.plan = plan
        return sum_rows(rows_ND.contiguous(), plan.rows_of_slot)

    @staticmethod
    def backward(ctx, grad_TD):
        return grad_TD.index_select(0, ctx.plan.slot_of_row), None


class Exchange(NamedTuple):
    """What the ranks that share the experts send each other.

    Attributes:
        sent: Rows that this rank sends to each rank.
        received: Rows that it receives from each rank, M in sum.
        plan: Where the received rows go, one for each: from sorted by rank and expert to sorted by expert and rank.
        counts: Rows of each of this rank's experts. int64, shape (experts of a rank,).
    """

    sent: list[int]
    received: list[int]
    plan: RowPlan
    counts: torch.Tensor


def plan_exchange(counts_E: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
    """Agree on the sizes of an all-to-all. A collective, for which the host waits.

    Args:
        counts_E: Rows of this rank for each expert of the model. int64, shape (E,).
        group: The ranks that share the experts, in the experts' order.
    """
    size = group.size()
    all_counts = counts_E.new_empty(size * counts_E.numel())
    dist.all_gather_into_tensor(all_counts, counts_E.contiguous(), group=group)
    # From each rank to each of this rank's experts.
    counts_RE = all_counts.view(size, size, -1)[:, group.rank()]
    sent, received = torch.stack((counts_E.view(size, -1).sum(1), counts_RE.sum(1))).tolist()
    num_rows, sizes = sum(received), counts_RE.T.reshape(-1)
    starts = (counts_RE.reshape(-1).cumsum(0) - counts_RE.reshape(-1)).view_as(counts_RE).T.reshape(-1)
    shift = (starts - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes, output_size=num_rows)
    order = torch.arange(num_rows, device=counts_E.device)
    source = order + shift
    place = torch.empty_like(source).scatter_(0, source, order)
    return Exchange(sent, received, RowPlan(source, place[:, None]), counts_RE.sum(0))


class SortingDispatcher(MoETokenDispatcher):
    """Sends rows sorted by expert, and gathers instead of adding.

    Source:
        Methods and their order as `megatron.core.transformer.moe.token_dispatcher.MoETokenDispatcher`, 0.16.1 and
        0.19.2.
    """

    @torch.compiler.disable
    def dispatch_preprocess(
        self, tokens_T1D: torch.Tensor, routing_TE: torch.Tensor, weights_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row and a weight for each slot and chosen expert, sorted by expert."""
        self._shape, top_k = tokens_T1D.shape, self.config.moe_router_topk
        self._plan, pair_of_row = plan_rows(routing_TE, top_k)
        self._exchange = None
        counts_E = routing_TE.sum(dim=0)
        if self.ep_size > 1:
            self._exchange = plan_exchange(counts_E, self.ep_group)
            counts_E = self._exchange.counts
        self._counts = counts_E
        weights_N = weights_TE.T.reshape(-1).index_select(0, pair_of_row)
        slots_TD, width, plan = tokens_T1D.view(-1, self._shape[-1]), self._shape[-1], self._plan
        origin = origin_of(tokens_T1D) or Origin(lambda tokens: tokens, slots_TD)
        rows_ND = _TakeRows.apply(slots_TD, plan)

        def make_rows(source: torch.Tensor) -> torch.Tensor:
            return origin.function(source).view(-1, width).index_select(0, plan.slot_of_row)

        return keep_origin(rows_ND, Origin(make_rows, origin.source)), weights_N

    @torch.compiler.disable
    def token_dispatch(self, rows_ND: torch.Tensor, weights_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows and weights that other ranks send to this rank's experts."""
        if self._exchange is None:
            return rows_ND, weights_N
        sizes = self._exchange.received, self._exchange.sent
        return all_to_all(self.ep_group, rows_ND, *sizes), all_to_all(self.ep_group, weights_N, *sizes)

    @torch.compiler.disable
    def dispatch_postprocess(
        self, rows_MD: torch.Tensor, weights_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows sorted by this rank's experts, the number of each expert's, and their weights."""
        if self._exchange is not None:
            rows_MD = _TakeRows.apply(rows_MD, self._exchange.plan)
            weights_M = weights_M.index_select(0, self._exchange.plan.slot_of_row)
        return rows_MD, self._counts, weights_M

    @torch.compiler.disable
    def combine_preprocess(self, rows_MD: torch.Tensor) -> torch.Tensor:
        """Return the results sorted by the ranks that they go back to."""
        return rows_MD if self._exchange is None else _SumRows.apply(rows_MD, self._exchange.plan)

    @torch.compiler.disable
    def token_combine(self, rows_MD: torch.Tensor) -> torch.Tensor:
        """Return the results of this rank's own rows."""
        if self._exchange is None:
            return rows_MD
        return all_to_all(self.ep_group, rows_MD, self._exchange.sent, self._exchange.received)

    @torch.compiler.disable
    def combine_postprocess(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Return the sum of each slot's results, in the shape that came."""
        output = _SumRows.apply(rows_ND, self._plan).view(self._shape)
        # The layer outlives its row.
        self._plan = self._exchange = self._counts = None
        return output


def put_in_dispatchers(model: torch.nn.Module) -> None:
    """Replace the dispatchers of a model's layers, but those that overlap a shared expert with communication.

    Args:
        model: A model of Megatron-Core, whose specification has no place for them.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            if layer.config.moe_shared_expert_overlap:
                keep_transfers_eager(layer.token_dispatcher)
            else:
                kind = GatheringDispatcher if layer.config.gathers_slots else SortingDispatcher
                layer.token_dispatcher = kind(layer.config, get_default_pg_collection())
