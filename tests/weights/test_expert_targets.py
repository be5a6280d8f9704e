"""LoRA selection on mixture-of-experts models: target_parameters as in peft, target_modules beyond it."""

import copy
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper

from hf_megapack.errors import ConfigError
from hf_megapack.weights import resolve_lora
from hf_megapack.weights.adapter import lora_spec
from tests.helpers.tiny_moe import FAMILIES, moe_linear_names, tiny_moe

# peft 0.21.2 reads a property that transformers 5.24 renamed; delete once peft reads is_activation_checkpointing.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXPERTS = "model.layers.2.mlp.experts"


@cache
def linear_names(family):
    return tuple(moe_linear_names(tiny_moe(family, "meta")))


def peft_adapters(family, config):
    """What peft itself makes of the config: our name of the module to (r, alpha, scaling)."""
    model = get_peft_model(tiny_moe(family, "meta"), copy.deepcopy(config)).base_model.model
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            name = name.replace(".base_layer", "")
            if isinstance(module, ParamWrapper) and module.parameter_name != "weight":
                name = f"{name}.{module.parameter_name}"
            assert name not in found
            found[name] = (module.r["default"], module.lora_alpha["default"], module.scaling["default"])
    return found


def ours(family, config):
    specs = resolve_lora(config, linear_names(family), model_type=family)
    return {name: (spec.rank, spec.alpha, spec.scaling) for name, spec in specs.items()}


PARAMETERS = [
    *("gate_up_proj", "down_proj", "experts.gate_up_proj", "mlp.experts.down_proj", f"{EXPERTS}.gate_up_proj"),
    *("mlp.gate_proj.weight", "shared_expert.up_proj.weight", "shared_experts.down_proj.weight"),
    *("v_proj.weight", "model.layers.1.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"),
    *("experts.gate_proj", "v_proj", "norm.weight", "mlp.gate.weight", "weight", "experts.0.down_proj"),
]
PATTERN_KEYS = [
    *("gate_up_proj", "down_proj", r".*experts\.gate_up_proj", r"layers\.2\..*", "gate_proj.weight", "v_proj"),
    *("q_proj", "weight", r"shared_expert\.up_proj\.weight", f"{EXPERTS}.down_proj"),
]


@st.composite
def parameter_configs(draw):
    narrow = st.dictionaries(st.sampled_from(PATTERN_KEYS), st.integers(1, 9), max_size=2)
    patterns = st.one_of(st.just({}), st.builds(lambda first, rank: first | {".*": rank}, narrow, st.integers(1, 9)))
    good = st.lists(st.sampled_from(PARAMETERS[:9]), min_size=1, max_size=4, unique=True)
    any_ = st.lists(st.sampled_from(PARAMETERS), min_size=1, max_size=4, unique=True)
    return LoraConfig(
        r=draw(st.integers(1, 9)),
        lora_alpha=draw(st.sampled_from([1, 8, 7.5])),
        use_rslora=draw(st.booleans()),
        # peft rewrites target_modules that name projections of experts; those have tests of their own.
        target_modules=draw(st.sampled_from([[], ["o_proj"], ["q_proj", "o_proj"], r".*\.[ko]_proj", None])),
        target_parameters=draw(st.one_of(good, any_)),
        rank_pattern=draw(patterns),
        alpha_pattern=draw(patterns),
    )


def does_less_or_more_than_it_says(family, config):
    """Whether an entry selects nothing in peft, or something that stays frozen; found by asking peft."""
    for entry in config.target_parameters:
        probe = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=[entry])
        reached = peft_adapters(family, probe).keys() - {f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)}
        if not reached or any(name.rpartition(".")[2] in ("gate", "lm_head", "norm") for name in reached):
            return True
    for key in {*config.rank_pattern, *config.alpha_pattern}:
        probe = copy.deepcopy(config)
        probe.rank_pattern, probe.alpha_pattern = {key: 50}, {}
        if not any(rank == 50 for rank, _, _ in peft_adapters(family, probe).values()):
            return True
    return False


@pytest.mark.filterwarnings(
    "ignore:The following .*_pattern keys:RuntimeWarning", "ignore:target_.* were set but no:RuntimeWarning"
)
def test_parameters_are_selected_as_in_peft():
    """Same parameters, ranks and scales as peft; refused only where peft raises or the config misleads."""
    counts = {"agreed": 0, "both refused": 0, "refused here": 0}
    with_patterns = 0

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(FAMILIES), parameter_configs())
    def check(family, config):
        nonlocal with_patterns
        before = copy.deepcopy(config)
        try:
            expected = peft_adapters(family, config)
        except (ValueError, IndexError):  # the latter is how peft 0.20 refuses the weight of a norm
            expected = None
        try:
            found = ours(family, config)
        except ConfigError:
            found = None
        assert config == before
        if expected is None:
            assert found is None
            counts["both refused"] += 1
        elif found is None:
            assert does_less_or_more_than_it_says(family, config)
            counts["refused here"] += 1
        else:
            assert found == expected
            assert {name: lora_spec(config, name) for name in found} == resolve_lora(
                config, linear_names(family), model_type=family
            )
            counts["agreed"] += 1
            with_patterns += bool(config.rank_pattern or config.alpha_pattern)

    check()
    assert counts["agreed"] >= 30, counts
    assert with_patterns >= 10
    assert min(counts.values()) >= 10, counts


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_every_projection_but_routers_and_head(family):
    names = linear_names(family)
    frozen = {"lm_head", *(name for name in names if name.endswith(".shared_expert_gate"))}
    assert len(frozen) == (3 if family == "qwen2_moe" else 1)
    specs = resolve_lora(LoraConfig(target_modules="all-linear"), names)
    assert list(specs) == [name for name in names if name not in frozen]
    assert f"{EXPERTS}.gate_proj" in specs
    assert f"{EXPERTS}.gate_up_proj" not in specs


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "reached"),
    [
        ("glm4_moe", {"experts.down_proj", "experts.gate_up_proj", "gate"}),
        ("mixtral", {"experts.down_proj", "experts.gate_up_proj", "gate"}),
        ("qwen2_moe", {"down_proj", "shared_expert.down_proj", "shared_expert_gate"}),
        ("qwen3_moe", {"experts.down_proj", "experts.gate_up_proj", "gate"}),
    ],
)
def test_all_linear_of_peft_is_something_else(family, reached):
    """What the page on adapters says of it, gate and up of ordinary modules left out; attention is always there."""
    found = {name.split(".", 3)[3] for name in peft_adapters(family, LoraConfig(target_modules="all-linear"))}
    parts = {name.removeprefix("mlp.") for name in found if not name.endswith((".gate_proj", ".up_proj"))}
    assert parts == reached | {f"self_attn.{leaf}_proj" for leaf in "qkvo"}


def test_short_names_reach_dense_shared_and_routed_experts():
    specs = resolve_lora(LoraConfig(target_modules=["up_proj"]), linear_names("glm4_moe"))
    assert list(specs) == [
        "model.layers.0.mlp.up_proj",
        *(f"model.layers.{layer}.mlp.{part}.up_proj" for layer in (1, 2) for part in ("experts", "shared_experts")),
    ]
    only = resolve_lora(LoraConfig(target_modules=["experts.up_proj"]), linear_names("glm4_moe"))
    assert list(only) == [f"model.layers.{layer}.mlp.experts.up_proj" for layer in (1, 2)]


def test_patterns_give_experts_a_rank_of_their_own():
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules="all-linear",
        rank_pattern={r"experts\.(gate|up|down)_proj": 4},
        alpha_pattern={r"experts\.(gate|up)_proj": 4},
    )
    specs = resolve_lora(config, linear_names("qwen3_moe"))
    assert (specs[f"{EXPERTS}.up_proj"].rank, specs[f"{EXPERTS}.up_proj"].scaling) == (4, 1.0)
    assert (specs[f"{EXPERTS}.down_proj"].rank, specs[f"{EXPERTS}.down_proj"].scaling) == (4, 8.0)
    assert specs["model.layers.1.mlp.up_proj"].rank == 16


def test_parameters_decide_for_the_experts_that_they_name():
    """The config that PEFT users write for such models: one A for gate and up instead of two."""
    config = LoraConfig(target_modules="all-linear", target_parameters=["mlp.experts.gate_up_proj", "down_proj"])
    names = linear_names("qwen3_moe")
    specs = resolve_lora(config, names)
    everything = resolve_lora(LoraConfig(target_modules="all-linear"), names)
    apart = {f"model.layers.{layer}.mlp.experts.{leaf}" for layer in (0, 2) for leaf in ("gate_proj", "up_proj")}
    together = {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 2)}
    assert specs.keys() == (everything.keys() - apart) | together
    one_layer = LoraConfig(target_modules="all-linear", target_parameters=[f"{EXPERTS}.gate_up_proj"])
    assert "model.layers.0.mlp.experts.gate_proj" in resolve_lora(one_layer, names)


def test_patterns_see_experts_as_modules_beside_weights_of_the_same_name():
    config = LoraConfig(
        r=2,
        target_modules=["experts.down_proj"],
        target_parameters=["mlp.down_proj.weight", "down_proj.weight"],
        rank_pattern={"down_proj": 3, "down_proj.weight": 5},
    )
    names = linear_names("glm4_moe")
    specs = resolve_lora(config, names)
    ranks = {name.partition(".mlp.")[2]: spec.rank for name, spec in specs.items()}
    assert ranks == {"down_proj": 5, "experts.down_proj": 3, "shared_experts.down_proj": 5}
    assert {name: lora_spec(config, name) for name in specs} == specs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": [f"{EXPERTS}.0.up_proj"]}, "without index"),
        ({"target_modules": ["experts.3.up_proj"]}, "without index"),
        ({"target_modules": r".*experts\.\d+\.up_proj"}, "without index"),
        ({"target_modules": r".*experts\.[0-3]\..*"}, "without index"),
        ({"target_modules": ["up_proj"], "rank_pattern": {"experts.1.up_proj": 2}}, "rank_pattern.*without index"),
        (
            {"target_modules": ["up_proj"], "alpha_pattern": {r"experts\.\d\.up_proj": 2}},
            "alpha_pattern.*without index",
        ),
        ({"target_modules": [], "target_parameters": ["experts.1.down_proj"]}, "without index"),
        ({"target_modules": ["experts"]}, "not a linear module"),
        ({"target_modules": ["w1"]}, "'w1' matches nothing.*gate_proj"),
        ({"target_modules": r".*mlp\..*"}, "router"),
        ({"target_modules": r".*(router|q_proj)"}, "router"),
        ({"target_modules": ["mlp.gate"]}, "router"),
        ({"target_modules": ["shared_expert_gate"]}, "router"),
        ({"target_modules": [], "target_parameters": ["gate.weight"]}, "router"),
        ({"target_modules": [], "target_parameters": ["lm_head.weight"]}, "output head"),
        ({"target_modules": [], "target_parameters": ["embed_tokens.weight"]}, "embedding"),
        ({"target_modules": [], "target_parameters": ["input_layernorm.weight"]}, "'input_layernorm.weight' matches"),
        ({"target_modules": [], "target_parameters": ["q_proj.bias"]}, "'q_proj.bias' matches nothing"),
        ({"target_modules": [], "target_parameters": ["q_proj"]}, "q_proj.weight"),
        ({"target_modules": [], "target_parameters": ["weight"]}, "name the module"),
        ({"target_modules": [], "target_parameters": []}, "matches nothing"),
        ({"target_modules": None}, "no default for models with experts"),
        ({"target_modules": ["q_proj"], "target_parameters": ["q_proj.weight"]}, "use one of the two"),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1], "target_parameters": ["down_proj"]},
            "layers_to_transform=.1. does not filter target_parameters",
        ),
        (
            {"target_modules": ["q_proj"], "exclude_modules": [EXPERTS], "target_parameters": ["q_proj.weight"]},
            "use one of the two",
        ),
        (
            {"target_modules": [], "exclude_modules": ["experts.down_proj"], "target_parameters": ["down_proj"]},
            "peft does not exclude parameters",
        ),
        ({"target_modules": ["gate_proj", "up_proj"], "rank_pattern": {"experts.up_proj": 2}}, "scales 1 and 4 differ"),
    ],
)
def test_targets_that_cannot_be_meant_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        resolve_lora(LoraConfig(**options), linear_names("qwen2_moe"))


def test_gate_and_up_may_differ_in_rank_but_not_in_scale():
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["gate_proj", "up_proj"],
        rank_pattern={"experts.up_proj": 8},
        alpha_pattern={"experts.up_proj": 16},
    )
    specs = resolve_lora(config, linear_names("mixtral"))
    assert specs[f"{EXPERTS}.gate_proj"].rank == 4
    assert specs[f"{EXPERTS}.up_proj"].rank == 8
