"""The Triton kernels behind `pointwise`, and their gradients.

Both passes read each tensor once and write each result once, and compute in float32. The backward passes take what the
forward pass was given and compute the rest again: nothing else is kept.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_megapack.kernels.pointwise import HeadNorm

# Elements that one program of the activation handles, and heads that one program of the rotation handles.
SWIGLU_BLOCK = 1024
HEADS_BLOCK = 16
# Elements of a slot for each warp that normalises it, of which there are 4 to 32.
NORM_BLOCK = 1024


@triton.jit
def _swiglu_forward(gate_up, output, num_channels, block: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < num_channels
    row = gate_up + slot * 2 * num_channels
    gate = tl.load(row + channel, mask=inside).to(tl.float32)
    up = tl.load(row + num_channels + channel, mask=inside).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(output + slot * num_channels + channel, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, grad, grad_gate_up, num_channels, block: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < num_channels
    row = slot * 2 * num_channels
    gate = tl.load(gate_up + row + channel, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row + num_channels + channel, mask=inside).to(tl.float32)
    grad_output = tl.load(grad + slot * num_channels + channel, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad_output * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad_output * gate * sigmoid
    dtype = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + row + channel, grad_gate.to(dtype), mask=inside)
    tl.store(grad_gate_up + row + num_channels + channel, grad_up.to(dtype), mask=inside)


class FusedSwiglu(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx, gate_up):  # noqa: D102
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        num_channels = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], num_channels)
        grid = (output.numel() // num_channels, triton.cdiv(num_channels, SWIGLU_BLOCK))
        if output.numel():
            _swiglu_forward[grid](gate_up, output, num_channels, block=SWIGLU_BLOCK)
        return output

    @staticmethod
    def backward(ctx, grad):  # noqa: D102
        (gate_up,) = ctx.saved_tensors
        num_channels = gate_up.shape[-1] // 2
        grad_gate_up = torch.empty_like(gate_up)
        grid = (grad.numel() // num_channels, triton.cdiv(num_channels, SWIGLU_BLOCK))
        if grad.numel():
            _swiglu_backward[grid](gate_up, grad.contiguous(), grad_gate_up, num_channels, block=SWIGLU_BLOCK)
        return grad_gate_up


@triton.jit
def _rms_norm_forward(hidden, weight, output, eps, num_channels: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * num_channels
    channel = tl.arange(0, block)
    inside = channel < num_channels
    value = tl.load(hidden + row + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / num_channels + eps)
    result = value * scale * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row + channel, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(  # noqa: PLR0913 (a kernel's arguments)
    hidden, weight, grad, grad_residual, grad_hidden, eps,
    num_channels: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num_channels
    channel = tl.arange(0, block)
    inside = channel < num_channels
    value = tl.load(hidden + row + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / num_channels + eps)
    value *= scale
    weighted = tl.load(grad + row + channel, mask=inside, other=0.0).to(tl.float32)
    weighted *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    result = (weighted - value * (tl.sum(weighted * value, axis=0) / num_channels)) * scale
    result += tl.load(grad_residual + row + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_hidden + row + channel, result.to(grad_hidden.dtype.element_ty), mask=inside)


def _norm_sizes(num_channels: int) -> dict[str, int]:
    block = triton.next_power_of_2(num_channels)
    return {"num_channels": num_channels, "block": block, "num_warps": min(max(4, block // NORM_BLOCK), 32)}


class FusedNormAndResidual(torch.autograd.Function):
    """The RMS norm of its input under a frozen weight, and the input itself: their gradients are summed in one pass."""

    @staticmethod
    def forward(ctx, hidden, weight, eps):  # noqa: D102
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        # A parameter's size: torch.compile takes a tensor's for one that may change.
        output, num_channels = torch.empty_like(hidden), weight.shape[0]
        if hidden.numel():
            _rms_norm_forward[(hidden.numel() // num_channels,)](
                hidden, weight, output, eps,
                **_norm_sizes(num_channels),
            )  # fmt: skip
        return output, hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad, grad_residual):  # noqa: D102
        hidden, weight = ctx.saved_tensors
        grad_hidden, num_channels = torch.empty_like(hidden), weight.shape[0]
        if hidden.numel():
            _rms_norm_backward[(hidden.numel() // num_channels,)](
                hidden, weight, grad.contiguous(), grad_residual.contiguous(), grad_hidden, ctx.eps,
                **_norm_sizes(num_channels),
            )  # fmt: skip
        return grad_hidden, None, None


@triton.jit
def _load_parts(pointer, inside, dim, half: tl.constexpr, head_dim: tl.constexpr, other):
    """Load what turns first, what turns second, and what does not turn, as float32; `other` where there is nothing."""
    turns = inside & (dim < half)[None, :]
    first = tl.load(pointer + dim[None, :], mask=turns, other=other).to(tl.float32)
    second = tl.load(pointer + half + dim[None, :], mask=turns, other=other).to(tl.float32)
    rest = tl.zeros_like(first)
    if head_dim > 2 * half:
        stays = inside & (2 * half + dim < head_dim)[None, :]
        rest = tl.load(pointer + 2 * half + dim[None, :], mask=stays, other=other).to(tl.float32)
    return first, second, rest


@triton.jit
def _store_parts(pointer, inside, dim, half: tl.constexpr, head_dim: tl.constexpr, first, second, rest):  # noqa: PLR0913 (three parts)
    dtype = pointer.dtype.element_ty
    turns = inside & (dim < half)[None, :]
    tl.store(pointer + dim[None, :], first.to(dtype), mask=turns)
    tl.store(pointer + half + dim[None, :], second.to(dtype), mask=turns)
    if head_dim > 2 * half:
        stays = inside & (2 * half + dim < head_dim)[None, :]
        tl.store(pointer + 2 * half + dim[None, :], rest.to(dtype), mask=stays)


@triton.jit
def _split_heads(  # noqa: PLR0913 (a kernel's arguments)
    mixed, query, key, value, grad_mixed,
    rotation, query_weight, key_weight, key_slots,
    num_slots, eps,
    num_groups: tl.constexpr, group_size: tl.constexpr, first_place: tl.constexpr, num_places: tl.constexpr,
    half: tl.constexpr, head_dim: tl.constexpr,
    has_norm: tl.constexpr, has_key_slots: tl.constexpr, is_backward: tl.constexpr,
    heads_block: tl.constexpr, dim_block: tl.constexpr,
):  # fmt: skip
    """Go from `mixed` to `query`, `key` and `value`, or from their gradients in these three to `grad_mixed`.

    Of each group only the heads from `first_place` on, `num_places` of them.
    """
    slot = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * heads_block + tl.arange(0, heads_block)
    dim = tl.arange(0, dim_block)
    group, place = index // num_places, first_place + index % num_places
    inside = (group < num_groups)[:, None]
    is_query = (place < group_size - 2)[:, None]
    is_value = (place == group_size - 1)[:, None]
    key_slot = tl.load(key_slots + slot) if has_key_slots else slot
    query += ((slot * num_groups + group) * (group_size - 2) + place)[:, None] * head_dim
    key += (key_slot * num_groups + group)[:, None] * head_dim
    value += (key_slot * num_groups + group)[:, None] * head_dim
    split = tl.where(is_query, query, tl.where(is_value, value, key))
    place_in_mixed = ((slot * num_groups + group) * group_size + place)[:, None] * head_dim
    cosine = tl.load(rotation + slot * half + dim, mask=dim < half, other=0.0)[None, :]
    sine = tl.load(rotation + (num_slots + slot) * half + dim, mask=dim < half, other=0.0)[None, :]
    # Values do not turn.
    cosine, sine = tl.where(is_value, 1.0, cosine), tl.where(is_value, 0.0, sine)
    if has_norm or not is_backward:
        first, second, rest = _load_parts(mixed + place_in_mixed, inside, dim, half, head_dim, 0.0)
    if has_norm:
        squares = tl.sum(first * first + second * second + rest * rest, axis=1)[:, None]
        # Nor are they normalised.
        scale = tl.where(is_value, 1.0, tl.rsqrt(squares / head_dim + eps))
        first, second, rest = first * scale, second * scale, rest * scale
        weight = tl.where(is_query, query_weight, key_weight)
        weight_first, weight_second, weight_rest = _load_parts(weight, inside & ~is_value, dim, half, head_dim, 1.0)
    if is_backward:
        turned, other, grad_rest = _load_parts(split, inside, dim, half, head_dim, 0.0)
        grad_first, grad_second = turned * cosine + other * sine, other * cosine - turned * sine
        if has_norm:
            grad_first, grad_second, grad_rest = (
                grad_first * weight_first,
                grad_second * weight_second,
                grad_rest * weight_rest,
            )
            along = tl.sum(grad_first * first + grad_second * second + grad_rest * rest, axis=1)[:, None] / head_dim
            along = tl.where(is_value, 0.0, along)
            grad_first = (grad_first - first * along) * scale
            grad_second = (grad_second - second * along) * scale
            grad_rest = (grad_rest - rest * along) * scale
        _store_parts(grad_mixed + place_in_mixed, inside, dim, half, head_dim, grad_first, grad_second, grad_rest)
    else:
        if has_norm:
            first, second, rest = first * weight_first, second * weight_second, rest * weight_rest
        turned, other = first * cosine - second * sine, second * cosine + first * sine
        _store_parts(split, inside, dim, half, head_dim, turned, other, rest)


class HeadSplit:
    """Queries, keys and values out of the fused projection, and the way back of their gradients, in one or two parts.

    Attributes:
        QUERIES: The part of the query heads.
        KEYS: The part of the key and value heads.
        ALL: Both.

    Args:
        rotation: As for `pointwise.split_heads`.
        norm: Norm of the heads, None for none.
        sizes: Key and value heads, heads that belong to one of them (its query heads, key and value), and elements of
            a head.
        key_slots: Where each slot's keys and values stand in their tensors, None for the slot's own place. int64,
            shape (T,).
    """

    QUERIES, KEYS, ALL = "queries", "keys", "all"

    def __init__(
        self,
        rotation: torch.Tensor,
        norm: HeadNorm | None,
        sizes: tuple[int, int, int],
        key_slots: torch.Tensor | None = None,
    ):
        self._rotation, self._norm, self._sizes, self._key_slots = rotation, norm, sizes, key_slots

    def forward(self, part: str, mixed: torch.Tensor, heads: Sequence[torch.Tensor]) -> None:
        """Write a part of query, key and value."""
        self._launch(part, mixed, heads, mixed, is_backward=False)

    def backward(
        self, part: str, mixed: torch.Tensor | None, grads: Sequence[torch.Tensor], grad_mixed: torch.Tensor
    ) -> None:
        """Write a part of the projection's gradient from those of query, key and value.

        Args:
            part: Which.
            mixed: The projection; read only with a norm.
            grads: Contiguous.
            grad_mixed: What is written.
        """
        self._launch(part, grad_mixed if mixed is None else mixed, grads, grad_mixed, is_backward=True)

    def _launch(self, part, mixed, heads, grad_mixed, *, is_backward) -> None:
        num_groups, group_size, head_dim = self._sizes
        num_slots, half = mixed.shape[0], self._rotation.shape[-1]
        if not num_slots:
            return
        first = group_size - 2 if part == self.KEYS else 0
        num_places = {self.QUERIES: group_size - 2, self.KEYS: 2, self.ALL: group_size}[part]
        # The stand-ins are never read.
        weights = (self._rotation,) * 2 if self._norm is None else (self._norm.query_D, self._norm.key_D)
        _split_heads[num_slots, triton.cdiv(num_groups * num_places, HEADS_BLOCK)](
            mixed, *heads, grad_mixed,
            self._rotation, *weights, self._rotation if self._key_slots is None else self._key_slots,
            num_slots, 0.0 if self._norm is None else self._norm.eps,
            num_groups=num_groups,
            group_size=group_size,
            first_place=first,
            num_places=num_places,
            half=half,
            head_dim=head_dim,
            has_norm=self._norm is not None,
            has_key_slots=self._key_slots is not None,
            is_backward=is_backward,
            heads_block=HEADS_BLOCK,
            dim_block=triton.next_power_of_2(max(half, head_dim - 2 * half)),
        )  # fmt: skip


class FusedSplitHeads(torch.autograd.Function):
    """Queries, keys and values out of the fused projection, normalised and rotated."""

    @staticmethod
    def forward(ctx, mixed, rotation, norm: HeadNorm | None, num_groups, head_dim):  # noqa: D102
        mixed, rotation = mixed.contiguous(), rotation.contiguous()
        num_slots, group_size = mixed.shape[0], mixed.shape[1] // (num_groups * head_dim)
        query = mixed.new_empty(num_slots, num_groups * (group_size - 2), head_dim)
        key, value = mixed.new_empty(2, num_slots, num_groups, head_dim).unbind()
        ctx.sizes, ctx.norm = (num_groups, group_size, head_dim), norm
        # Without a norm the gradient needs no more than the angles.
        ctx.save_for_backward(rotation, *([mixed] if norm is not None else []))
        HeadSplit(rotation, norm, ctx.sizes).forward(HeadSplit.ALL, mixed, (query, key, value))
        return query, key, value

    @staticmethod
    def backward(ctx, *grads):  # noqa: D102
        rotation, *saved = ctx.saved_tensors
        num_groups, group_size, head_dim = ctx.sizes
        grads = tuple(grad.contiguous() for grad in grads)
        grad_mixed = grads[0].new_empty(grads[0].shape[0], num_groups * group_size * head_dim)
        split = HeadSplit(rotation, ctx.norm, ctx.sizes)
        split.backward(HeadSplit.ALL, saved[0] if saved else None, grads, grad_mixed)
        return grad_mixed, None, None, None, None
