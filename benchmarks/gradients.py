"""What the benchmarks of exactness share: a reduced model, adapters that are not zero, and gradients side by side."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import stored_examples
import torch
import workload
from transformers import LlamaConfig, PretrainedConfig

from hf_megapack.batch import PackedBatch
from hf_megapack.data.collator import PrefixTreeCollator
from hf_megapack.megatron.backend import MegatronBackend
from hf_megapack.packing import Alignment, num_visible_pairs, slots_cost

ONE_PROCESS = {
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_parallel_size": 1,
    "virtual_pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
}
# Of B. A keeps its start; with both the updates are about a tenth of the frozen products.
FACTOR_STD = 0.02


def backend_arguments(**options) -> SimpleNamespace:
    """Return what MegatronBackend reads of MegaPackConfig: one process in bfloat16, changed by `options`."""
    others = {"bf16": True, "recompute": "off", "seed": 0, "fp8": None, "torch_compile": False}
    others |= {"moe_shared_expert_overlap": False, "moe_token_dispatcher_type": "alltoall"}
    return SimpleNamespace(**{**ONE_PROCESS, **others, **options})


def reduced_llama(*, is_tiny: bool) -> LlamaConfig:
    """Return a Llama of four layers with random weights of standard deviation 0.02.

    Args:
        is_tiny: Whether a CPU shall run it in seconds.
    """
    hidden, heads, ffn, vocab = (128, 4, 352, 2048) if is_tiny else (2048, 16, 5632, 32000)
    return LlamaConfig(
        num_hidden_layers=4,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=40960,
        initializer_range=0.02,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )


def columns(examples: Sequence[stored_examples.Example], vocab_size: int) -> list[dict]:
    """Return examples as the collator takes them; tokens that the vocabulary lacks are taken modulo its size."""
    return [{"input_ids": e.input_ids % vocab_size, "loss_mask": e.loss_mask} for e in examples]


def row_costs(batch: PackedBatch) -> list[float]:
    """Return what each row costs by the scheduler's model, in slots."""
    return [slots_cost(row.input_ids.size, num_visible_pairs(row.subtree_end)) for row in batch.rows]


def pack(examples: list[dict], capacity: int, multiple: int = 1, **options) -> PackedBatch:
    """Pack an update.

    Args:
        examples: Of `columns`.
        capacity: Slots of a row.
        multiple: Of a row's slots.
        **options: For the collator.
    """
    alignment = Alignment(packed_multiple=multiple)
    return PrefixTreeCollator(packed_sequence_length=capacity, alignment=alignment, **options)(examples)


def use_ieee_float32() -> None:
    """Turn TF32 off in matrix products; FlexAttention's Triton kernels follow the same setting."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False


class Probe:
    """A model whose adapter is not zero, and the gradients of updates at that point.

    Weights and factors are numbers that bfloat16 holds, so that a float32 model computes with the same ones.

    Args:
        config: The model.
        arguments: Of `backend_arguments`.
    """

    def __init__(self, config: PretrainedConfig, arguments: SimpleNamespace):
        self.backend = MegatronBackend(config, arguments, workload.lora_config())
        generator = torch.Generator().manual_seed(1)
        self._state = {}
        for key, value in self.backend.adapter_state().items():
            if "lora_B" in key:
                value = torch.randn(value.shape, generator=generator) * FACTOR_STD
            self._state[key] = value.bfloat16().float()
        with torch.no_grad():
            for parameter in self.backend.model.parameters():
                parameter.copy_(parameter.bfloat16())
        self.backend.load_adapter(self._state)

    def run(self, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss of an update, in nats, and the whole gradient of every factor. Every rank calls it."""
        result = self.backend.run_step(batch)
        # The factors' own way out gathers the shards of any layout.
        with torch.no_grad():
            for parameter in self.backend.parameters.values():
                parameter.copy_(parameter.grad)
        gradients = self.backend.adapter_state()
        self.backend.load_adapter(self._state)
        return result.loss, gradients

    def close(self) -> None:
        """Free the model."""
        self.backend.close()
        self.backend = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a run is from its reference, in per cent.

    Attributes:
        loss: Of the loss.
        worst: The largest MAPE of a factor's gradient: mean |a - b| over mean |b|.
        worst_key: That factor.
        median: Of the factors' MAPEs.
        mean: Of the factors' MAPEs.
    """

    loss: float
    worst: float
    worst_key: str
    median: float
    mean: float

    @classmethod
    def between(
        cls, ours: tuple[float, Mapping[str, torch.Tensor]], reference: tuple[float, Mapping[str, torch.Tensor]]
    ) -> "Difference":
        """Compare two results of `Probe.run`.

        Args:
            ours: One.
            reference: The other.

        Raises:
            SystemExit: If they are of other factors, or a reference gradient is zero: nothing would be compared.
        """
        if ours[1].keys() != reference[1].keys() or not reference[1]:
            raise SystemExit("The two runs have gradients of different factors.")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = {}
        for key, value in reference[1].items():
            right = value.to(device).double()
            scale = float(right.abs().mean())
            if scale == 0:
                raise SystemExit(f"The reference gradient of {key} is zero.")
            found[key] = float((ours[1][key].to(device).double() - right).abs().mean()) / scale * 100
        worst_key = max(found, key=found.__getitem__)
        return cls(
            loss=abs(ours[0] - reference[0]) / abs(reference[0]) * 100,
            worst=found[worst_key],
            worst_key=worst_key.replace("base_model.model.model.", "").replace(".weight", ""),
            median=statistics.median(found.values()),
            mean=statistics.fmean(found.values()),
        )

    def cells(self) -> str:
        """Return the columns of `HEADER`."""
        return f"{self.loss:.2g} % | {self.worst:.3g} % | {self.median:.3g} % | {self.mean:.3g} % | {self.worst_key}"


HEADER = "loss differs | worst MAPE | median | mean | worst factor"
