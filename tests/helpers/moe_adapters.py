"""Adapters of tiny mixture-of-experts models: random ones, and what they must compute, by plain loops."""

import json

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from hf_megapack.weights import resolve_lora
from tests.helpers.tiny_moe import NUM_EXPERTS, moe_linear_names, tiny_moe

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INPUT_IDS = torch.tensor([[5, 17, 99, 3, 64, 2, 120, 8]])
PREFIX = "base_model.model."


def weight_of(model, name):
    """Return the slice of the model's weights that a module is: 2-D, or 3-D for experts."""
    start, _, leaf = name.rpartition(".")
    if not start.endswith(".experts"):
        return model.get_submodule(name).weight
    experts = model.get_submodule(start)
    half = experts.gate_up_proj.shape[1] // 2
    return {
        "gate_proj": experts.gate_up_proj[:, :half],
        "up_proj": experts.gate_up_proj[:, half:],
        "gate_up_proj": experts.gate_up_proj,
        "down_proj": experts.down_proj,
    }[leaf]


def random_adapter(peft_config, family, seed=1):
    """Return random factors of the shapes that the config asks for, in the layout of training."""
    model = tiny_moe(family)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, spec in resolve_lora(peft_config, moe_linear_names(model)).items():
        *stack, out_features, in_features = weight_of(model, name).shape
        for factor, shape in (("A", (spec.rank, in_features)), ("B", (out_features, spec.rank))):
            values = torch.randn(*stack, *shape, generator=generator) * 0.1
            state[f"{PREFIX}{name}.lora_{factor}.weight"] = values
    return state


def logits(model):
    """Return the logits of a few tokens."""
    with torch.no_grad():
        return model(INPUT_IDS).logits


def merged_logits(family, peft_config, state):
    """Return the logits of a model with scaling * B A added to its weights by hand, expert by expert."""
    model = tiny_moe(family)
    with torch.no_grad():
        for name, spec in resolve_lora(peft_config, moe_linear_names(model)).items():
            factor_a, factor_b = (state[f"{PREFIX}{name}.lora_{factor}.weight"].double() for factor in "AB")
            weight = weight_of(model, name)
            if weight.dim() == 2:
                weight += (spec.scaling * factor_b @ factor_a).float()
            else:
                for expert in range(NUM_EXPERTS):
                    weight[expert] += (spec.scaling * factor_b[expert] @ factor_a[expert]).float()
    return logits(model)


def read_json(directory):
    """Return the fields of an adapter's config."""
    return json.loads((directory / CONFIG).read_text())


def edit_json(directory, **changes):
    """Change fields of an adapter's config."""
    (directory / CONFIG).write_text(json.dumps(read_json(directory) | changes))


def assert_same_adapter(found, expected):
    """Compare keys and every bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


BLOCKS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def single_expert_keys(state, family):
    """Return the state with keys of transformers 4, a pair of factors for each expert, and the projections' names."""
    block, *leaves = BLOCKS.get(family, ("mlp", "gate_proj", "up_proj", "down_proj"))
    tensors = {}
    for key, tensor in state.items():
        module, _, factor = key.rpartition(".lora_")
        if ".experts." not in key:
            tensors[key] = tensor
            continue
        leaf = leaves[("gate_proj", "up_proj", "down_proj").index(module.rpartition(".")[2])]
        start = module.partition(".mlp.")[0]
        for expert in range(NUM_EXPERTS):
            tensors[f"{start}.{block}.experts.{expert}.{leaf}.lora_{factor}"] = tensor[expert].contiguous()
    return tensors, leaves


def write_version_4(directory, family, **fields):
    """Write an adapter of attention and experts with keys of transformers 4; return config and state of training."""
    ours = LoraConfig(target_modules=r".*(self_attn\.(q|o)_proj|\.experts\..*)", **fields)
    state = random_adapter(ours, family)
    tensors, leaves = single_expert_keys(state, family)
    directory.mkdir()
    LoraConfig(target_modules=["q_proj", "o_proj", *leaves], **fields).save_pretrained(directory)
    save_file(tensors, directory / WEIGHTS)
    return ours, state
