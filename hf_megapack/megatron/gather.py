"""Bring all slots of the ranks that share experts to each of them, and back to each rank the sums for its own slots.

Where `dispatch` sends a slot once for each chosen expert, here it travels once to each rank, and each rank returns one
sum of its experts' results instead of the results. The host waits for the device once per layer, to learn how many rows
its experts get, but the slots are on their way by then.

The rows that an expert sees, and their order, are those of `dispatch`. What differs is where the sum over a slot's
experts has its brackets: each rank sums those of its own experts in their order, in float32, and these sums travel as
they are and are added in the order of the ranks. No sum is left to a reduction of the communication library, so the
same layout gives the same bits; another layout may differ by a rounding in float32.

Shapes: T slots of this rank, G ranks that share experts, P slots of the one that has most, S = G * P gathered slots, E
experts of the model, K experts of a slot, D hidden size, M rows that this rank's experts get, C channels.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import pad

from hf_megapack.kernels.experts import sum_rows
from hf_megapack.megatron.lora_products import Origin, keep_origin


class SlotShares(NamedTuple):
    """Slots of several ranks, in as many places for each as the one needs that has most.

    Attributes:
        group: The ranks, in the order of their experts.
        num_slots: T.
        num_places: P.
    """

    group: dist.ProcessGroup
    num_slots: int
    num_places: int

    def gather(self, local_TC: torch.Tensor, fill: float = 0.0) -> tuple[torch.Tensor, dist.Work]:
        """Begin to gather a tensor from all ranks. A collective.

        Args:
            local_TC: Of this rank's slots.
            fill: What stands in places without a slot.

        Returns:
            Same dtype, shape (S, C), and what has to be waited for before it is read.
        """
        local_PC = pad(local_TC.detach(), (0, 0, 0, self.num_places - self.num_slots), value=fill).contiguous()
        gathered_SC = local_PC.new_empty(self.group.size() * self.num_places, local_PC.shape[1])
        work = dist.all_gather_into_tensor(gathered_SC, local_PC, group=self.group, async_op=True)
        return gathered_SC, work

    def add_up(self, summand_SC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Add what each rank has for this rank's slots, in the order of the ranks. A collective.

        Args:
            summand_SC: What this rank has for the slots of all. float32 or wider, contiguous, shape (S, C).
            dtype: Of the sum.

        Returns:
            Shape (T, C).
        """
        received_SC = torch.empty_like(summand_SC)
        dist.all_to_all_single(received_SC, summand_SC, group=self.group)
        places = torch.arange(len(received_SC), device=received_SC.device).view(-1, self.num_places)
        return sum_rows(received_SC, places[:, : self.num_slots].T.contiguous(), dtype)


class GatheredPlan(NamedTuple):
    """Which of the gathered slots go to this rank's experts.

    Attributes:
        shares: Where the gathered slots come from.
        choice_of_row: Which choice of which slot each row is, of S * K. int64, shape (M,).
        slot_of_row: Which of the gathered slots. int64, shape (M,).
        rows_of_slot: The rows that come from each gathered slot, in the order of the experts, -1 for those of other
            ranks' experts. int64, shape (S, K).
        counts: Rows of each of this rank's experts. int64, shape (experts of a rank,).
    """

    shares: SlotShares
    choice_of_row: torch.Tensor
    slot_of_row: torch.Tensor
    rows_of_slot: torch.Tensor
    counts: torch.Tensor


def plan_gathered(experts_SK: torch.Tensor, num_local_experts: int, shares: SlotShares) -> GatheredPlan:
    """Lay out one row for each gathered slot and chosen expert of this rank, sorted by expert, then rank and slot.

    The host waits for the device, for M alone.

    Args:
        experts_SK: The experts of each slot, ascending and counted from this rank's first; others are below 0 or from
            `num_local_experts` on. int32, shape (S, K).
        num_local_experts: Experts of this rank.
        shares: Where the slots come from.
    """
    top_k, device = experts_SK.shape[1], experts_SK.device
    is_here = (experts_SK >= 0) & (experts_SK < num_local_experts)
    # Behind all that are here.
    expert_of_choice = experts_SK.where(is_here, num_local_experts).flatten()
    experts, order = expert_of_choice.sort(stable=True)
    locals_E = torch.arange(num_local_experts, dtype=experts.dtype, device=device)
    ends_E = torch.searchsorted(experts, locals_E, right=True)
    row_of_choice = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    rows_of_slot = row_of_choice.view_as(experts_SK).where(is_here, -1)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    choice_of_row = order[: int(ends_E[-1])]
    return GatheredPlan(shares, choice_of_row, choice_of_row // top_k, rows_of_slot, counts_E)


def chosen_experts(routing_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the experts of each slot, ascending. No size depends on the data.

    Args:
        routing_TE: Whether a slot goes to an expert; K experts for each slot. bool, shape (T, E).
        top_k: K.

    Returns:
        int64, shape (T, K).

    Example:
        >>> chosen_experts(torch.tensor([[True, False, True], [True, True, False]]), 2).tolist()
        [[0, 2], [0, 1]]
    """
    num_slots, num_experts = routing_TE.shape
    # What is not chosen is written behind the end.
    place_TE = (routing_TE.cumsum(1) - 1).where(routing_TE, top_k)
    experts_TE = torch.arange(num_experts, device=routing_TE.device).expand(num_slots, num_experts)
    return place_TE.new_empty(num_slots, top_k + 1).scatter_(1, place_TE, experts_TE)[:, :top_k].contiguous()


class _TakeRowsOfAll(torch.autograd.Function):
    """Rows and their weights, taken from what was gathered of all ranks' slots and of the weights of their choices."""

    @staticmethod
    def forward(ctx, slots_TD, weights_TK, gathered, plan):
        ctx.plan, ctx.dtypes = plan, (slots_TD.dtype, weights_TK.dtype)
        gathered_SD, weights_SK = gathered
        return gathered_SD.index_select(0, plan.slot_of_row), weights_SK.flatten().index_select(0, plan.choice_of_row)

    @staticmethod
    def backward(ctx, grad_MD, grad_weights_M):
        plan, (slots_dtype, weights_dtype) = ctx.plan, ctx.dtypes
        wide = torch.promote_types(slots_dtype, torch.float32)
        grad_TD = plan.shares.add_up(sum_rows(grad_MD.contiguous(), plan.rows_of_slot, wide), slots_dtype)
        # One rank has a choice's gradient, so that adding zeros is all that is done to it.
        grad_weights = grad_weights_M.new_zeros(plan.rows_of_slot.numel())
        grad_weights.scatter_(0, plan.choice_of_row, grad_weights_M)
        return grad_TD, plan.shares.add_up(grad_weights.view_as(plan.rows_of_slot), weights_dtype), None, None


class _SumRowsOfAll(torch.autograd.Function):
    """Each of this rank's slots is the sum of its rows, wherever they are."""

    @staticmethod
    def forward(ctx, rows_MD, plan):
        ctx.plan = plan
        wide = torch.promote_types(rows_MD.dtype, torch.float32)
        return plan.shares.add_up(sum_rows(rows_MD.contiguous(), plan.rows_of_slot, wide), rows_MD.dtype)

    @staticmethod
    def backward(ctx, grad_TD):
        gathered_SD, work = ctx.plan.shares.gather(grad_TD)
        work.wait()
        return gathered_SD.index_select(0, ctx.plan.slot_of_row), None


class GatheringDispatcher(MoETokenDispatcher):
    """Gathers all slots of the ranks that share experts, and returns sums.

    Ranks may run rows of different lengths. The longest is known beforehand, because every rank knows the whole update,
    so nothing is exchanged for it: `expect` is told before each row.

    Source:
        Methods and their order as `megatron.core.transformer.moe.token_dispatcher.MoETokenDispatcher`, 0.16.1 and
        0.19.2.
    """

    _num_places, _wants_origin = 0, False

    @torch.compiler.disable
    def expect(self, num_places: int, *, is_recomputed: bool) -> None:
        """Prepare for a row.

        Args:
            num_places: The most slots that any of the ranks which share experts has, the same number on each of them.
            is_recomputed: Whether the experts make their rows again in the backward pass, if they can.
        """
        self._num_places = num_places
        # Rows are kept where they are fewer than the gathered slots that they could be made from.
        self._wants_origin = is_recomputed and self.config.moe_router_topk > self.ep_size

    @torch.compiler.disable
    def dispatch_preprocess(
        self, tokens_T1D: torch.Tensor, routing_TE: torch.Tensor, weights_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's slots, and the weights of each slot's experts in their order."""
        self._shape = tokens_T1D.shape
        slots_TD = tokens_T1D.view(-1, self._shape[-1])
        assert len(slots_TD) <= self._num_places, (len(slots_TD), self._num_places)
        self._shares = SlotShares(self.ep_group, len(slots_TD), self._num_places)
        self._experts = chosen_experts(routing_TE, self.config.moe_router_topk)
        return slots_TD, weights_TE.gather(1, self._experts)

    @torch.compiler.disable
    def token_dispatch(self, slots_TD: torch.Tensor, weights_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of this rank's experts and their weights."""
        num_experts, shares = self.config.num_moe_experts // self.ep_size, self._shares
        # In one message: the number of an expert is exact in float32, and no expert is below 0.
        choices = torch.cat((weights_TK.detach(), self._experts.to(weights_TK.dtype)), dim=1)
        choices_SC, choices_work = shares.gather(choices, fill=-1.0)
        slots_SD, slots_work = shares.gather(slots_TD)
        choices_work.wait()
        weights_SK, experts_SK = choices_SC.chunk(2, dim=1)
        plan = plan_gathered(experts_SK.int() - self.ep_group.rank() * num_experts, num_experts, shares)
        slots_work.wait()
        rows_MD, weights_M = _TakeRowsOfAll.apply(slots_TD, weights_TK, (slots_SD, weights_SK), plan)
        self._plan, self._experts = plan, None
        if self._wants_origin:
            keep_origin(rows_MD, Origin(lambda slots: slots.index_select(0, plan.slot_of_row), slots_SD))
        return rows_MD, weights_M

    @torch.compiler.disable
    def dispatch_postprocess(
        self, rows_MD: torch.Tensor, weights_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows, which are sorted, the number of each of this rank's experts, and their weights."""
        return rows_MD, self._plan.counts, weights_M

    @torch.compiler.disable
    def combine_preprocess(self, rows_MD: torch.Tensor) -> torch.Tensor:
        """Return the results as they are."""
        return rows_MD

    @torch.compiler.disable
    def token_combine(self, rows_MD: torch.Tensor) -> torch.Tensor:
        """Return the sum of the results for each of this rank's slots."""
        return _SumRowsOfAll.apply(rows_MD, self._plan)

    @torch.compiler.disable
    def combine_postprocess(self, slots_TD: torch.Tensor) -> torch.Tensor:
        """Return the sums in the shape that came."""
        # The layer outlives its row.
        self._plan = self._shares = None
        return slots_TD.view(self._shape)


class GatheringLayer(TransformerLayer):
    """Megatron-Core's layer, which tells its dispatcher about the row that it is given.

    The row's parameters reach a layer but not its experts. Nothing is left over for another microbatch: also a layer
    that is computed again is told again.
    """

    def forward(self, *args, packed_seq_params, **kwargs):
        """Run the layer; arguments and results are Megatron-Core's."""
        dispatcher, experts = self.mlp.token_dispatcher, self.mlp.experts
        dispatcher.expect(packed_seq_params.num_expert_places, is_recomputed=experts.is_recomputed)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
