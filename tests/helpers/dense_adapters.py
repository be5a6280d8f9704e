"""Adapters of tiny dense models: configs, random factors, and what they must compute, by weights merged by hand."""

import json

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from hf_megapack.weights import resolve_lora

CONFIG_CLASSES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INPUT_IDS = torch.tensor([[5, 17, 99, 3, 64, 2]])
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIGS = {
    "all-linear": {"target_modules": "all-linear", "r": 4, "lora_alpha": 8},
    "list": {"target_modules": ["v_proj", "q_proj"], "r": 2, "use_rslora": True},
    "regex": {"target_modules": r".*\.1\.(self_attn|mlp)\.(q|up)_proj", "r": 3},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["0.mlp.up_proj", "k_proj"], "r": 3},
    "one layer": {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "patterns": {
        "target_modules": "all-linear",
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, r".*layers\.1\..*_proj": 6},
        "alpha_pattern": {"mlp.up_proj": 3, r"layers\.0\..*": 5},
        "use_rslora": True,
    },
}
OLD = LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=4)
REPLACEMENTS = {
    "same config": LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=4),
    # Old weights load under this config without a complaint, and compute something that nobody trained.
    "other scale": LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=64),
    "other modules": LoraConfig(target_modules=["v_proj", "up_proj"], r=3),
}


def tiny_model(family="llama"):
    """Return a model of two layers with the same random weights every time."""
    config = CONFIG_CLASSES[family](
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=128,
        pad_token_id=None,
        tie_word_embeddings=family == "qwen2",
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def linear_names(model):
    """Return the paths of all linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def random_adapter(peft_config, model=None, seed=1):
    """Return random factors of the shapes that the config asks for."""
    model = model or tiny_model()
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, spec in resolve_lora(peft_config, linear_names(model)).items():
        linear = model.get_submodule(name)
        for factor, shape in (("A", (spec.rank, linear.in_features)), ("B", (linear.out_features, spec.rank))):
            key = f"base_model.model.{name}.lora_{factor}.weight"
            state[key] = torch.randn(shape, generator=generator) * 0.3
    return state


def merged_logits(model, peft_config, state):
    """Return the logits of hand-merged weights, scaling * B A added: what any reader of the adapter must compute."""
    with torch.no_grad():
        for name, spec in resolve_lora(peft_config, linear_names(model)).items():
            factor_a, factor_b = (state[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            model.get_submodule(name).weight += spec.scaling * factor_b @ factor_a
        return model(INPUT_IDS).logits


def peft_logits(model):
    """Return the logits of a few tokens."""
    with torch.no_grad():
        return model(INPUT_IDS).logits


def read_json(directory):
    """Return the fields of an adapter's config."""
    return json.loads((directory / CONFIG).read_text())


def edit_json(directory, **changes):
    """Change fields of an adapter's config."""
    (directory / CONFIG).write_text(json.dumps(read_json(directory) | changes))
