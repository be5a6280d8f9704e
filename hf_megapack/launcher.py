"""What accelerate's launcher asks for through the environment: taken where it can be, refused where it is not.

Batches and gradients do not pass through accelerate, so nothing that it would do to them happens.
"""

import os

import torch

from hf_megapack.errors import ConfigError

_PLUGINS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")


def check_launcher() -> None:
    """Refuse plugins and compilers of accelerate's configuration.

    Raises:
        ConfigError: Naming the variable that the launcher has set.
    """
    for plugin in _PLUGINS:
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() in ("1", "true"):
            raise ConfigError(
                f"This process was launched with accelerate's {plugin} plugin (ACCELERATE_USE_{plugin}), which is "
                "not supported: launch without it and use tensor_parallel_size and the fields beside it."
            )
    compiler = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no":
        raise ConfigError(
            f"accelerate's configuration asks for the compiler {compiler!r} (ACCELERATE_DYNAMO_BACKEND), but the model "
            "does not pass through accelerate. Take it out there; torch_compile=True compiles layers."
        )


def resolve_bf16(bf16: bool | None, *, fp8: str | None, use_cpu: bool) -> bool:
    """Return whether to compute in bfloat16.

    Args:
        bf16: As for MegaPackConfig; None takes what accelerate's configuration says, or the device's default.
        fp8: As for MegaPackConfig.
        use_cpu: As for MegaPackConfig.

    Raises:
        ConfigError: If accelerate's configuration asks for another precision.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16") or (precision == "bf16" and bf16 is False):
        raise ConfigError(
            f"accelerate's configuration asks for mixed_precision={precision!r} (ACCELERATE_MIXED_PRECISION), but "
            f"bf16={bf16} and fp8={fp8!r} in MegaPackConfig decide. Set mixed_precision to 'no' there, and bf16 or fp8 "
            "as you want it."
        )
    if bf16 is not None:
        return bf16
    return precision == "bf16" or (torch.cuda.is_available() and not use_cpu)
