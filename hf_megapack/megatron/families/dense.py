"""What every dense decoder of the Llama lineage has in common: the mapping of its configuration and weights.

A family states only what differs: which projections carry a bias, whether queries and keys are normalised, and which
layers see a sliding window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from hf_megapack.errors import ConfigError
from hf_megapack.megatron.rotary import rotary_frequencies
from hf_megapack.weights.names import HeadLayout, WeightRule

if TYPE_CHECKING:
    from hf_megapack.megatron.families.moe import ExpertSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFamily:
    """What differs between the dense families.

    Attributes:
        model_type: transformers' name of the family.
        has_qkv_bias: From the configuration, whether q_proj, k_proj and v_proj have a bias.
        has_output_bias: The same for o_proj.
        has_mlp_bias: The same for gate_proj, up_proj and down_proj.
        has_qk_norm: Whether queries and keys pass an RMS norm per head.
        windows: From the configuration, each layer's sliding window in tokens, None for full attention.
    """

    model_type: str
    has_qkv_bias: Callable[[PretrainedConfig], bool] = lambda config: False
    has_output_bias: Callable[[PretrainedConfig], bool] = lambda config: False
    has_mlp_bias: Callable[[PretrainedConfig], bool] = lambda config: False
    has_qk_norm: bool = False
    windows: Callable[[PretrainedConfig], list[int | None]] = lambda config: [None] * config.num_hidden_layers

    def resolved(self, config: PretrainedConfig) -> "DenseFamily":
        """Return the family with whatever a configuration decides about it."""
        return self

    def experts(self, config: PretrainedConfig) -> "ExpertSettings | None":
        """Return how the model's experts are chosen, None for a model without."""
        return None

    def split_sizes(self, config: PretrainedConfig) -> dict[str, int]:
        """Return the sizes that tensor parallelism splits, under their names in the configuration."""
        return {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        }

    def is_unread(self, config: PretrainedConfig, name: str) -> bool:
        """Return whether a checkpoint may hold a weight that no rule reads: a stored copy of a tied head."""
        return bool(config.tie_word_embeddings) and name == "lm_head.weight"

    def heads(self, config: PretrainedConfig) -> HeadLayout:
        """Return the attention sizes of a configuration."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return HeadLayout(
            num_heads=config.num_attention_heads, num_groups=config.num_key_value_heads, head_dim=head_dim
        )

    def check(self, config: PretrainedConfig) -> None:
        """Refuse what would not compute the same model.

        Args:
            config: transformers configuration.

        Raises:
            ConfigError: For an activation other than SiLU, a dropout in attention, attention in both directions, heads
                that do not share keys evenly, an unknown kind of layer, a window that is not set or empty, or a rotary
                scaling that packing cannot reproduce.
        """
        if config.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported: only 'silu' (SwiGLU) is.")
        if getattr(config, "attention_dropout", 0.0):
            raise ConfigError(
                f"attention_dropout={config.attention_dropout} in the model's config. A shared prefix is computed "
                "once, so its dropout could not differ between examples. Set attention_dropout to 0."
            )
        # No class has the field, but transformers' masks ask every configuration for it, and embedding models set it.
        if not getattr(config, "is_causal", True):
            raise ConfigError(
                f"is_causal={config.is_causal} in the model's config lets transformers attend to later tokens too, the "
                "learned ones among them. Take is_causal out of the config to train the model as a causal one."
            )
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        if groups < 1 or heads % groups:
            raise ConfigError(
                f"num_attention_heads={heads} in the model's config is not a multiple of num_key_value_heads={groups}, "
                "so no key belongs to a whole number of queries."
            )
        layer_types = getattr(config, "layer_types", None) or []
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ConfigError(f"Layers of type {', '.join(unknown)} are not supported for {self.model_type}.")
        smallest = min((window for window in self.windows(config) if window is not None), default=1)
        if smallest < 1:
            raise ConfigError(
                f"sliding_window={smallest} in the model's config lets no token see itself (use_sliding_window may be "
                "False). Set use_sliding_window=True and a sliding_window, or make every layer full_attention."
            )
        rotary_frequencies(config, self.heads(config).head_dim)

    def rules(self, config: PretrainedConfig) -> list[WeightRule]:
        """Return the rules of the whole model, embedding first.

        Args:
            config: transformers configuration.
        """
        rules = [
            WeightRule(
                parameter="embedding.word_embeddings.weight",
                sources=("model.embed_tokens.weight",),
                shard_dim=0,
                role="embedding",
            )
        ]
        for layer in range(config.num_hidden_layers):
            rules.extend(self._layer_rules(config, layer))
        rules.append(
            WeightRule(parameter="decoder.final_layernorm.weight", sources=("model.norm.weight",), role="norm")
        )
        if not config.tie_word_embeddings:
            rules.append(
                WeightRule(parameter="output_layer.weight", sources=("lm_head.weight",), shard_dim=0, role="head")
            )
        return rules

    def _layer_rules(self, config: PretrainedConfig, layer: int) -> Iterator[WeightRule]:
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        qkv = ("q_proj", "k_proj", "v_proj")
        yield _norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm")
        yield from _linear(
            f"{ours}.self_attention.linear_qkv",
            tuple(f"{theirs}.self_attn.{name}" for name in qkv),
            fusion="grouped_qkv",
            has_bias=self.has_qkv_bias(config),
        )
        if self.has_qk_norm:
            yield _norm(f"{ours}.self_attention.q_layernorm", f"{theirs}.self_attn.q_norm")
            yield _norm(f"{ours}.self_attention.k_layernorm", f"{theirs}.self_attn.k_norm")
        yield from _linear(
            f"{ours}.self_attention.linear_proj",
            (f"{theirs}.self_attn.o_proj",),
            is_row_parallel=True,
            has_bias=self.has_output_bias(config),
        )
        yield _norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm")
        yield from self.mlp_rules(config, layer)

    def mlp_rules(self, config: PretrainedConfig, layer: int) -> Iterator[WeightRule]:
        """Return the rules of a layer's MLP.

        Args:
            config: transformers configuration.
            layer: Counted from the first layer of the model.
        """
        has_bias = self.has_mlp_bias(config)
        yield from gated_mlp_rules(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", has_bias=has_bias)


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """Return each layer's window from `layer_types` and `sliding_window`.

    Args:
        config: transformers configuration.

    Raises:
        ConfigError: If a layer is sliding but no window is set.
    """
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    if config.sliding_window is None and "sliding_attention" in config.layer_types:
        raise ConfigError(
            "layer_types names sliding_attention but sliding_window is None (use_sliding_window may be False). "
            "Set use_sliding_window=True and a sliding_window, or make every layer full_attention."
        )
    return windows


def _norm(parameter: str, source: str) -> WeightRule:
    return WeightRule(parameter=f"{parameter}.weight", sources=(f"{source}.weight",), role="norm")


def gated_mlp_rules(parameter: str, source: str, *, has_bias: bool = False) -> Iterator[WeightRule]:
    """Return the rules of an MLP with gate_proj, up_proj and down_proj, from its path here and in transformers."""
    gate_up = (f"{source}.gate_proj", f"{source}.up_proj")
    yield from _linear(f"{parameter}.linear_fc1", gate_up, fusion="stacked", has_bias=has_bias)
    down = (f"{source}.down_proj",)
    yield from _linear(f"{parameter}.linear_fc2", down, is_row_parallel=True, has_bias=has_bias)


def _linear(
    parameter: str, sources: tuple[str, ...], *, has_bias: bool, fusion: str = "one", is_row_parallel: bool = False
) -> Iterator[WeightRule]:
    yield WeightRule(
        parameter=f"{parameter}.weight",
        sources=tuple(f"{source}.weight" for source in sources),
        fusion=fusion,
        shard_dim=1 if is_row_parallel else 0,
        role="linear",
    )
    if has_bias:
        yield WeightRule(
            parameter=f"{parameter}.bias",
            sources=tuple(f"{source}.bias" for source in sources),
            fusion=fusion,
            shard_dim=None if is_row_parallel else 0,
            role="linear",
        )
