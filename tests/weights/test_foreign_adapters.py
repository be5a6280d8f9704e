"""Adapters of other writers: read as they are, written again to the same effect, and refused where they are damaged."""

import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from hf_megapack.errors import ExportError, NonFiniteResultError
from hf_megapack.weights import export_peft_adapter, read_peft_adapter
from hf_megapack.weights.export import check_holds_targets
from tests.helpers.dense_adapters import (
    CONFIG,
    CONFIGS,
    Q0,
    WEIGHTS,
    edit_json,
    linear_names,
    merged_logits,
    peft_logits,
    read_json,
    tiny_model,
)

# peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_adapter_name", [True, False])
def test_adapter_written_by_peft_is_read_and_written_again(tmp_path, dtype, with_adapter_name):
    """Third-party adapter in, our adapter out: same logits; half precision becomes the same numbers in float32."""
    peft_config = LoraConfig(target_modules=["q_proj", "down_proj", "c_attn"], r=4, init_lora_weights=False)
    torch.manual_seed(3)
    theirs = get_peft_model(tiny_model(), peft_config, autocast_adapter_dtype=False).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    written = load_file(tmp_path / "theirs" / WEIGHTS)
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    if with_adapter_name:
        named = {key.replace(".weight", ".default.weight"): tensor for key, tensor in written.items()}
        save_file(named, tmp_path / "theirs" / WEIGHTS)

    config, state = read_peft_adapter(tmp_path / "theirs")
    assert type(config) is LoraConfig
    assert config.target_modules == {"q_proj", "down_proj"}
    assert state.keys() == written.keys()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert all(torch.equal(tensor, written[key].to(torch.float32)) for key, tensor in state.items())

    names = linear_names(tiny_model())
    export_peft_adapter(state, config, tmp_path / "ours", base_model_name=None, linear_names=names)
    ours = PeftModel.from_pretrained(tiny_model(), tmp_path / "ours")
    expected = merged_logits(tiny_model(), config, state)
    torch.testing.assert_close(peft_logits(ours), expected, rtol=1e-5, atol=1e-5)


def test_what_only_concerns_training_does_not_stop_reading(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj"], r=4, lora_dropout=0.05)
    get_peft_model(tiny_model(), peft_config).save_pretrained(tmp_path, save_embedding_layers=False)
    config, state = read_peft_adapter(tmp_path)
    assert config.lora_dropout == 0.05
    names = linear_names(tiny_model())
    export_peft_adapter(state, config, tmp_path / "copy", base_model_name=None, linear_names=names)
    assert read_json(tmp_path / "copy")["lora_dropout"] == 0.0


# Not "patterns": peft sorts their keys when it saves, and the first that matches is another one then.
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"patterns"}))
def test_module_that_config_and_model_have_and_the_file_has_not_is_named(tmp_path, name):
    """Left out, as peft would not do, it would not be trained although the config says so."""
    config, names = LoraConfig(**CONFIGS[name]), linear_names(tiny_model())
    get_peft_model(tiny_model(), config).save_pretrained(tmp_path, save_embedding_layers=False)
    check_holds_targets(tmp_path, read_peft_adapter(tmp_path)[1], names)
    tensors = load_file(tmp_path / WEIGHTS)
    lost = sorted(tensors)[0].removeprefix("base_model.model.").partition(".lora_")[0]
    save_file({key: tensor for key, tensor in tensors.items() if f"{lost}.lora_" not in key}, tmp_path / WEIGHTS)
    with pytest.raises(ExportError, match=f"{CONFIG} selects 1 modules that {WEIGHTS} lacks, as {lost}"):
        check_holds_targets(tmp_path, read_peft_adapter(tmp_path)[1], names)
    check_holds_targets(tmp_path, read_peft_adapter(tmp_path)[1], [name for name in names if name != lost])


def test_an_adapter_on_other_base_weights_says_how_to_convert_it(tmp_path, prepared):
    """To set init_lora_weights to true without converting would add the adapter to weights that it is not for."""
    shutil.copytree(prepared[0] / "old", tmp_path / "adapter")
    edit_json(tmp_path / "adapter", init_lora_weights="olora")
    with pytest.raises(ExportError, match=rf"adapter/{CONFIG}: .*'olora'.*path_initial_model_for_weight_conversion"):
        read_peft_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"use_idea_of_2030": True}, "use_idea_of_2030"),
        ({"r": 3}, "its rank is 3"),
        ({"r": 0}, "LoraConfig.r must"),
        ({"rank_pattern": {"q_proj": 5}}, "its rank is 5"),
        ({"target_modules": ["v_proj"]}, "does not select 2 modules of the file, as model.layers.0.self_attn.q_proj"),
        ({"target_modules": r".*\.0\..*"}, "does not select 1 modules of the file"),
        ({"target_modules": r"((("}, "regular expression"),
        ({"target_modules": "q_proj", "layers_to_transform": [1]}, "no valid LoRA config"),
    ],
)
def test_config_that_does_not_describe_the_file_is_refused(tmp_path, prepared, changes, words):
    shutil.copytree(prepared[0] / "old", tmp_path / "adapter")
    read_peft_adapter(tmp_path / "adapter")
    edit_json(tmp_path / "adapter", **changes)
    with pytest.raises(ExportError, match=words):
        read_peft_adapter(tmp_path / "adapter")


def test_unknown_field_that_is_off_is_no_obstacle(tmp_path, prepared):
    shutil.copytree(prepared[0] / "old", tmp_path / "adapter")
    edit_json(tmp_path / "adapter", use_idea_of_2030=False)
    read_peft_adapter(tmp_path / "adapter")


def test_missing_and_damaged_files_are_named(tmp_path, prepared):
    with pytest.raises(ExportError, match=r"adapter_config\.json is missing"):
        read_peft_adapter(tmp_path / "nowhere")
    directory = tmp_path / "adapter"
    shutil.copytree(prepared[0] / "old", directory)
    weights = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(weights[:-10])
    with pytest.raises(ExportError, match="Cannot read the adapter"):
        read_peft_adapter(directory)
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")
    with pytest.raises(ExportError, match=r"adapter_model.safetensors is missing.*save them again"):
        read_peft_adapter(directory)
    (directory / WEIGHTS).write_bytes(weights)
    for content in ("{", "[]", "nothing"):
        (directory / CONFIG).write_text(content)
        with pytest.raises(ExportError, match=CONFIG):
            read_peft_adapter(directory)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.full((2, 32), torch.nan), NonFiniteResultError, "1 of 4 adapter tensors"),
        (torch.zeros(2, 32, dtype=torch.int8), ExportError, "torch.int8"),
        (torch.zeros(2, 32, dtype=torch.float64), ExportError, "torch.float64"),
    ],
)
def test_tensor_that_cannot_be_continued_from_is_refused(tmp_path, prepared, value, error, words):
    shutil.copytree(prepared[0] / "old", tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file(tensors | {f"{Q0}.lora_A.weight": value}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(error, match=words):
        read_peft_adapter(tmp_path / "adapter")
