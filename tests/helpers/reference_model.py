"""The oracle: a transformers model with peft, one unpacked example at a time."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

_SIZES = {
    "vocab_size": 4096,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama_tied_bias_yarn": lambda: LlamaConfig(
        **_SIZES, rope_parameters=_YARN, tie_word_embeddings=True, attention_bias=True
    ),
    "llama_mlp_bias_linear": lambda: LlamaConfig(
        **_SIZES, mlp_bias=True, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None, head_dim=16, rope_parameters=_ROPE),
    "mistral_window": lambda: MistralConfig(**_SIZES, sliding_window=60, rope_parameters=_ROPE),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True, rope_parameters=_ROPE),
    "qwen2_window": lambda: Qwen2Config(
        **_SIZES, rope_parameters=_ROPE, use_sliding_window=True, sliding_window=100, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16, rope_parameters=_ROPE),
    "qwen3_bias": lambda: Qwen3Config(**_SIZES, head_dim=16, rope_parameters=_ROPE, attention_bias=True),
}
"""Tiny models of every supported family; between them every switch that a family has."""


def save_random_model(name: str, folder: Path, *, shard_size: str = "5GB", seed: int = 0) -> PretrainedConfig:
    """Save a tiny random model, biases and norms included, and return its configuration."""
    return save_model(CONFIGS[name](), folder, shard_size=shard_size, seed=seed)


def save_model(config: PretrainedConfig, folder: Path, *, shard_size: str = "5GB", seed: int = 0) -> PretrainedConfig:
    """Save a random model of a configuration, biases and norms included, and return its configuration."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif "norm" in key:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.config


def load_reference(folder: Path, peft_config: LoraConfig, state: Mapping[str, torch.Tensor] | None) -> PeftModel:
    """Return transformers + peft on a saved model, in float32, with the factors of `state` if given."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # peft writes the base model into the config that it is given.
    model = get_peft_model(base, copy.deepcopy(peft_config))
    if state is not None:
        with torch.no_grad():
            factors = peft_factors(model)
            assert set(factors) == set(state)
            for key, factor in factors.items():
                factor.copy_(state[key])
    return model.eval()


def peft_factors(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """Return a peft model's factors under the keys of its file."""
    return {k.replace(".default", ""): p for k, p in model.named_parameters() if "lora_" in k}


def example_loss(model: PeftModel, example: Mapping) -> torch.Tensor:
    """Return the summed loss of one example's loss-bearing tokens."""
    input_ids = torch.as_tensor(np.asarray(example["input_ids"], dtype=np.int64))
    mask = torch.as_tensor(np.asarray(example["loss_mask"], dtype=bool))[1:]
    logits = model(input_ids=input_ids[None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits[mask], input_ids[1:][mask], reduction="sum")


def reference_step(
    model: PeftModel, examples: Sequence[Mapping], *, wants_grad: bool = True
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss over all loss-bearing tokens of an update, and its gradient per factor."""
    total = sum(int(np.asarray(example["loss_mask"])[1:].sum()) for example in examples)
    model.zero_grad(set_to_none=True)
    loss_sum = 0.0
    with torch.set_grad_enabled(wants_grad):
        for example in examples:
            loss = example_loss(model, example)
            if wants_grad:
                (loss / total).backward()
            loss_sum += loss.item()
    return loss_sum / total, {key: factor.grad.clone() for key, factor in peft_factors(model).items() if wants_grad}


def random_adapter(state: Mapping[str, torch.Tensor], *, seed: int = 1, std: float = 0.2) -> dict[str, torch.Tensor]:
    """Return an adapter with the shapes of `state` and random factors, B not zero."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(value.shape, generator=generator) * std for key, value in sorted(state.items())}


def mape(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Return mean |a - b| / mean |b| in per cent."""
    return float((ours.double() - reference.double()).abs().mean() / reference.double().abs().mean() * 100)
