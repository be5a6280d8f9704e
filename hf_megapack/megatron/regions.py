"""Between what every tensor-parallel rank holds whole and what each holds a part of.

A pair of functions for each direction: with sequence parallelism the whole tensor is spread over the ranks by slots,
without it every rank has a copy. Forward and backward are each other's transpose, so each sum is made exactly once.
"""

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def enter_tensor_parallel(tensor: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """Give every tensor-parallel rank the whole tensor, of which each will use a part of the weights.

    Args:
        tensor: With sequence parallelism this rank's slots along dimension 0, else all slots; contiguous.
        sequence_parallel: Which of the two.

    Returns:
        All slots. The gradients that the ranks compute for it are summed on the way back.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True)
    return copy_to_tensor_model_parallel_region(tensor)


def leave_tensor_parallel(tensor: torch.Tensor, sequence_parallel: bool) -> torch.Tensor:
    """Sum what each tensor-parallel rank computed with its part of the weights.

    Args:
        tensor: This rank's summand for all slots; contiguous, and not used afterwards.
        sequence_parallel: Whether each rank keeps its own slots of the sum along dimension 0, else all.
    """
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(tensor)
    return reduce_from_tensor_model_parallel_region(tensor)


def gather_slots(tensor: torch.Tensor) -> torch.Tensor:
    """Give every tensor-parallel rank all slots; the gradient, the same on every rank, is cut on the way back.

    Args:
        tensor: This rank's slots along dimension 0; contiguous.
    """
    return gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=False)
