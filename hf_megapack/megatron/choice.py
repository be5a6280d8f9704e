"""Which attention trains a model on this machine: along the row's tree, or within each of its sequences ("thd").

Rows are laid out for one or the other, so the choice is made before the collator is built and is the same on every
rank.
"""

import importlib.util
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.attention import gpu_kernels
from hf_megapack.megatron.families import family_of
from hf_megapack.megatron.host import compute_device, has_gpu
from hf_megapack.megatron.sequences import LARGEST_HEAD

if TYPE_CHECKING:
    from hf_megapack.config import MegaPackConfig

# By the kernels that tree attention would take: sizes of heads for which "thd" was measured to be faster on rows that
# share nothing, without context parallelism.
FASTER_HEAD_SIZES: dict[str, tuple[int, ...]] = {"flash": (), "triton": (64, 128)}


def choose_attention(*, head_dim: int, tree_kernels: str, context_parallel_size: int) -> Literal["tree", "thd"]:
    """Return the faster attention for rows that share nothing, on a machine that has both.

    Args:
        head_dim: Elements of a head.
        tree_kernels: What `attention.gpu_kernels` says of the model's queries.
        context_parallel_size: Ranks that share each row.
    """
    return "thd" if context_parallel_size == 1 and head_dim in FASTER_HEAD_SIZES[tree_kernels] else "tree"


def resolve_attention(
    model: str | PretrainedConfig, args: "MegaPackConfig", packing_strategy: str
) -> Literal["tree", "thd"]:
    """Turn MegaPackConfig's `attention` into what is used. A collective for "auto" where there are several ranks.

    Args:
        model: Hub id, local folder or configuration of the base model.
        args: The training arguments.
        packing_strategy: Of the collator in use.

    Returns:
        The same on every rank: of "auto", "thd" only if every rank would choose it.

    Raises:
        ConfigError: If "thd" is asked for and this machine, the arguments, the collator or the model do not allow it.
    """
    may_share = packing_strategy == "prefix_tree"
    if args.attention == "tree" or (may_share and args.attention == "auto"):
        return "tree"
    obstacle = "has no shared prefixes, and packing_strategy='prefix_tree' makes them" if may_share else _obstacle(args)
    if obstacle is None:
        config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(str(model))
        family = family_of(config)
        has_windows = any(window is not None for window in family.windows(config))
        head_dim = family.heads(config).head_dim
        if head_dim > LARGEST_HEAD:
            obstacle = f"serves heads of at most {LARGEST_HEAD}, and the model's have {head_dim}"
        elif has_windows and args.context_parallel_size > 1:
            obstacle = (
                f"with context_parallel_size={args.context_parallel_size} has no sliding windows, which the model has"
            )
    if args.attention == "thd":
        if obstacle is not None:
            raise ConfigError(f"attention='thd' {obstacle}. Use attention='tree', which serves every packing strategy.")
        return "thd"
    is_thd = False
    if obstacle is None:
        queries = torch.empty(0, 1, head_dim, dtype=torch.bfloat16, device=compute_device())
        chosen = choose_attention(
            head_dim=head_dim,
            tree_kernels="triton" if args.full_determinism else gpu_kernels(queries),
            context_parallel_size=args.context_parallel_size,
        )
        is_thd = chosen == "thd"
    return "thd" if _on_all_ranks(is_thd) else "tree"


def _obstacle(args: "MegaPackConfig") -> str | None:
    """Return why "thd" cannot run here, whatever the model, to follow its name; None if it can."""
    if not has_gpu():
        return "needs a GPU, and none is visible"
    if importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine (pip install transformer-engine[pytorch])"
    if not args.bf16:
        return f"needs bf16=True, and bf16={args.bf16!r} was given"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs a GPU of compute capability 8.0 or later, and this one has {major}.{minor}"
    if (args.full_determinism or torch.are_deterministic_algorithms_enabled()) and major < 10:
        cause = "full_determinism=True" if args.full_determinism else "torch.use_deterministic_algorithms(True)"
        return (
            f"with {cause} needs a GPU of compute capability 10.0 or later, because Transformer Engine's "
            f"repeatable kernels serve short rows only before that, and this one has {major}.{minor}"
        )
    return None


def _on_all_ranks(claim: bool) -> bool:
    """Return whether every rank makes a claim. A collective where there are several ranks."""
    if not dist.is_initialized():
        return claim
    flag = torch.tensor(int(claim), device=compute_device())
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
