"""Adapter directories: exact in peft, equal bytes for equal input, old or new at any cut, refused if damaged."""

import shutil

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from hf_megapack.errors import ConfigError, ExportError, NonFiniteResultError
from hf_megapack.weights import export_peft_adapter, read_peft_adapter, resolve_lora, verify_with_peft
from tests.helpers.dense_adapters import (
    CONFIG,
    CONFIG_CLASSES,
    CONFIGS,
    Q0,
    REPLACEMENTS,
    WEIGHTS,
    edit_json,
    linear_names,
    merged_logits,
    peft_logits,
    random_adapter,
    read_json,
    tiny_model,
)
from tests.helpers.interruption import interrupted

# peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("with_names", [True, False])
@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("family", sorted(CONFIG_CLASSES))
def test_peft_computes_what_was_exported(tmp_path, family, name, with_names):
    """Logits equal those of hand-merged weights, and the modules in peft are exactly those in the file."""
    peft_config = LoraConfig(**CONFIGS[name])
    state = random_adapter(peft_config, tiny_model(family))
    names = linear_names(tiny_model(family)) if with_names else None
    export_peft_adapter(state, peft_config, tmp_path, base_model_name=None, linear_names=names)

    verify_with_peft(tmp_path, tiny_model(family))
    found = peft_logits(PeftModel.from_pretrained(tiny_model(family), tmp_path))
    expected = merged_logits(tiny_model(family), peft_config, state)
    assert (expected - peft_logits(tiny_model(family))).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    saved, back = read_peft_adapter(tmp_path)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert resolve_lora(saved, linear_names(tiny_model(family))) == resolve_lora(
        peft_config, linear_names(tiny_model(family))
    )


def test_auto_peft_model_finds_base_and_adapter(tmp_path):
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    peft_config = LoraConfig(target_modules=["q_proj"], r=4)
    state = random_adapter(peft_config)
    export_peft_adapter(state, peft_config, tmp_path / "adapter", base_model_name=str(base))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(peft_logits(model), merged_logits(tiny_model(), peft_config, state))


def test_written_config_is_complete_and_plain(tmp_path):
    peft_config = LoraConfig(
        target_modules={"v_proj", "q_proj", "o_proj"}, r=4, lora_alpha=6, init_lora_weights="gaussian", lora_dropout=0.0
    )
    names = linear_names(tiny_model())
    export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path, base_model_name="org/m", linear_names=names)
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": ["o_proj", "q_proj", "v_proj"],
        "target_parameters": None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "base_model_name_or_path": "org/m",
        "peft_version": peft.__version__,
    }
    written = read_json(tmp_path)
    assert {name: written[name] for name in expected} == expected
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [CONFIG, WEIGHTS]


def test_targets_are_full_paths_where_short_names_select_too_much(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj"], layers_to_transform=[1])
    names = linear_names(tiny_model())
    export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path, base_model_name=None, linear_names=names)
    assert read_json(tmp_path)["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_patterns_survive_the_sorting_of_json_keys(tmp_path):
    """The writer of peft sorts the keys too, and the first match wins: its adapter of this config does not load."""
    peft_config = LoraConfig(target_modules=["q_proj"], r=2, rank_pattern={"q_proj": 4, r"layers\.0\..*": 8})
    state = random_adapter(peft_config)
    assert {tensor.shape[0] for key, tensor in state.items() if "lora_A" in key} == {4}
    get_peft_model(tiny_model(), peft_config).save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "peft")
    export_peft_adapter(state, peft_config, tmp_path / "ours", base_model_name=None)
    verify_with_peft(tmp_path / "ours", tiny_model())


def test_patterns_stay_as_written_where_their_order_means_nothing(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"], rank_pattern={r"layers\.1\..*": 4, "0.*q_proj": 3})
    export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path, base_model_name=None)
    assert read_peft_adapter(tmp_path)[0].rank_pattern == peft_config.rank_pattern


def test_equal_input_gives_equal_bytes(tmp_path):
    """Order of the state, order of the targets, views of one buffer and what lay there before make no difference."""
    first = LoraConfig(target_modules=["v_proj", "q_proj", "up_proj"], alpha_pattern={"v_proj": 2, "q_proj": 3})
    second = LoraConfig(target_modules=("up_proj", "v_proj", "q_proj"), alpha_pattern={"q_proj": 3, "v_proj": 2})
    state = random_adapter(first)
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = torch.split(flat, [tensor.numel() for tensor in state.values()])
    views = {key: part.view_as(state[key]) for key, part in zip(state, parts, strict=True)}
    export_peft_adapter(state, first, tmp_path / "first", base_model_name="m")
    other = LoraConfig(target_modules=["o_proj"])
    export_peft_adapter(random_adapter(other), other, tmp_path / "second", base_model_name="m")
    export_peft_adapter(dict(reversed(views.items())), second, tmp_path / "second", base_model_name="m")
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


# Checks before writing


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_stops_the_export(tmp_path, value):
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path, base_model_name=None)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    state = random_adapter(peft_config, seed=2)
    bad = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    state[bad][3, 1] = value
    state["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"][0] = value
    with pytest.raises(
        NonFiniteResultError, match=rf"2 of 8 .*first is {bad} with 1 of 64 values.*nothing was written"
    ):
        export_peft_adapter(state, peft_config, tmp_path, base_model_name=None)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before
    with pytest.raises(NonFiniteResultError):
        export_peft_adapter(state, peft_config, tmp_path / "new", base_model_name=None)
    assert not (tmp_path / "new").exists()


DAMAGES = {
    "empty": (lambda state: state.clear(), "empty"),
    "B missing": (lambda state: state.pop(f"{Q0}.lora_B.weight"), r"missing for: model\.layers\.0\.self_attn\.q_proj"),
    "foreign": (lambda state: state.update({"lm_head.weight": torch.zeros(2)}), "no LoRA factors: lm_head.weight"),
    "bias": (lambda state: state.update({f"{Q0}.lora_B.bias": torch.zeros(2)}), "no LoRA factors"),
    "magnitude": (lambda state: state.update({f"{Q0}.lora_magnitude_vector": torch.zeros(2)}), "no LoRA factors"),
    "rank of A": (lambda state: state.update({f"{Q0}.lora_A.weight": torch.zeros(3, 32)}), r"q_proj has .*\(3, 32\)"),
    "rank of B": (lambda state: state.update({f"{Q0}.lora_B.weight": torch.zeros(32, 3)}), r"its rank is 2"),
    "dimensions": (lambda state: state.update({f"{Q0}.lora_B.weight": torch.zeros(32)}), r"its rank is 2"),
    "doubled": (lambda state: state.update({f"{Q0}.lora_A.default.weight": torch.zeros(2, 32)}), "twice"),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_state_that_is_no_adapter_is_refused_when_written_and_when_read(tmp_path, name):
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    state = random_adapter(peft_config)
    export_peft_adapter(state, peft_config, tmp_path / "good", base_model_name=None)
    damage, words = DAMAGES[name]
    damage(state)
    with pytest.raises(ExportError, match=words):
        export_peft_adapter(state, peft_config, tmp_path / "new", base_model_name=None)
    assert not (tmp_path / "new").exists()
    save_file(state, tmp_path / "good" / WEIGHTS)
    with pytest.raises(ExportError, match=words):
        read_peft_adapter(tmp_path / "good")


def test_adapter_that_lacks_modules_or_has_too_many_is_refused(tmp_path):
    names = linear_names(tiny_model())
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    state = {key: tensor for key, tensor in random_adapter(peft_config).items() if "layers.1.self_attn.v" not in key}
    with pytest.raises(ExportError, match=r"1 modules are lacking \['model.layers.1.self_attn.v_proj'\]"):
        export_peft_adapter(state, peft_config, tmp_path, base_model_name=None, linear_names=names)
    narrow = LoraConfig(target_modules=["q_proj"], r=2)
    with pytest.raises(ExportError, match=r"1 are too many \['model.layers.0.self_attn.v_proj'\]"):
        export_peft_adapter(state, narrow, tmp_path, base_model_name=None, linear_names=names)
    assert list(tmp_path.iterdir()) == []


def test_place_that_cannot_be_written_is_an_export_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    peft_config = LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ExportError, match="Cannot write the adapter"):
        export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path / "file", base_model_name=None)


# Old or new, never a mixture


def outcome(directory, *, as_peft_would):
    """Which adapter a reader finds: the (config, weights) bytes of the two files, or None."""
    if not as_peft_would:
        try:
            config, state = read_peft_adapter(directory)
        except ExportError:
            return None
        return config.lora_alpha, {key: tensor.tolist() for key, tensor in state.items()}
    if not (directory / CONFIG).exists():
        return None
    return (directory / CONFIG).read_bytes(), (directory / WEIGHTS).read_bytes()


@pytest.mark.parametrize("is_final", [True, False], ids=["power cut", "one failure"])
@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("new directory", "other scale"),
        ("tokenizer only", "other scale"),
        *(("over old", name) for name in REPLACEMENTS),
    ],
)
def test_interrupted_export_leaves_old_or_new(tmp_path, prepared, start, name, is_final):
    """At every operation: this package's reader finds old or new; peft finds one of them or, once cut, no config."""
    root, states = prepared
    found, cuts = set(), 0
    for step in range(40):
        directory = tmp_path / str(step)
        if start == "over old":
            shutil.copytree(root / "old", directory)
        elif start == "tokenizer only":
            directory.mkdir()
            (directory / "tokenizer.json").write_text("{}")
        with interrupted(step, is_final=is_final) as interruption:
            export_peft_adapter(*states[name], directory, base_model_name="m")
        for as_peft_would in (False, True):
            seen = outcome(directory, as_peft_would=as_peft_would)
            allowed = {"new": outcome(root / name, as_peft_would=as_peft_would), "none": None}
            if start == "over old":
                allowed["old"] = outcome(root / "old", as_peft_would=as_peft_would)
                if not (as_peft_would and is_final):
                    del allowed["none"]
            which = [label for label, value in allowed.items() if value == seen]
            assert which, (step, as_peft_would)
            found.add(which[0])
        if not interruption.happened:
            break
        cuts += 1
        # Whatever was left, the next export succeeds and tidies up.
        export_peft_adapter(*states["other scale"], directory, base_model_name="m")
        assert outcome(directory, as_peft_would=True) == outcome(root / "other scale", as_peft_would=True)
        assert {entry.name for entry in directory.iterdir()} <= {WEIGHTS, CONFIG, "tokenizer.json"}
    assert not interruption.happened
    assert cuts >= 9
    assert {"new", "old" if start == "over old" else "none"} <= found


def test_reader_notices_that_the_adapter_is_replaced_under_it(tmp_path, prepared, monkeypatch):
    root, states = prepared
    shutil.copytree(root / "old", tmp_path / "adapter")

    def replaced_before_loading(path):
        export_peft_adapter(*states["other scale"], tmp_path / "adapter", base_model_name="m")
        return load_file(path)

    monkeypatch.setattr("hf_megapack.weights.export.load_file", replaced_before_loading)
    with pytest.raises(ExportError, match="was replaced while it was read"):
        read_peft_adapter(tmp_path / "adapter")


# Verification with peft


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
def test_verification_lists_what_peft_drops_or_adds(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path, base_model_name=None)
    verify_with_peft(tmp_path, tiny_model())
    # A model of one layer less: peft drops that layer's factors without an error.
    small = tiny_model()
    del small.model.layers[1]
    with pytest.raises(ExportError, match=r"4 in the file only: .*layers\.1\.self_attn\.q_proj\.lora_A\.weight"):
        verify_with_peft(tmp_path, small)
    edit_json(tmp_path, target_modules=["q_proj", "v_proj", "k_proj"])
    with pytest.raises(ExportError, match=r"4 in the loaded model only: .*layers\.0\.self_attn\.k_proj"):
        verify_with_peft(tmp_path, tiny_model())


def test_verification_fails_when_peft_cannot_load(tmp_path):
    peft_config = LoraConfig(target_modules=["q_proj"], r=2)
    state = {
        key: tensor.repeat(1, 2) if "lora_A" in key else tensor for key, tensor in random_adapter(peft_config).items()
    }
    export_peft_adapter(state, peft_config, tmp_path, base_model_name=None)
    with pytest.raises(ExportError, match="cannot load"):
        verify_with_peft(tmp_path, tiny_model())


@pytest.mark.parametrize("base", ["Qwen/Qwen3-0.6B", torch.nn.Linear(1, 1)], ids=["name", "module"])
def test_verification_needs_a_loaded_transformers_model(tmp_path, base):
    with pytest.raises(ConfigError, match=rf"base_model is a {type(base).__name__}; give the loaded model"):
        verify_with_peft(tmp_path, base)


def test_verification_gives_the_base_model_back(tmp_path):
    peft_config = LoraConfig(target_modules="all-linear", r=2)
    export_peft_adapter(random_adapter(peft_config), peft_config, tmp_path, base_model_name=None)
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        verify_with_peft(tmp_path, model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
