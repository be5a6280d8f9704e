"""A backend in plain torch that learns in milliseconds: an embedding, two LoRA projections and the embedding as head.

It has the interface of `hf_megapack.megatron.backend.MegatronBackend` and one more: `poison` makes chosen updates
non-finite. The model looks at one token at a time, so packing cannot change its loss; what a test of the trainer sees
is the trainer's doing.
"""

import math

import numpy as np
import torch

from hf_megapack.batch import PackedBatch, StepResult
from hf_megapack.errors import ExportError

VOCAB_SIZE, HIDDEN_SIZE, RANK = 4608, 16, 4
PREFIX = "base_model.model.model.layers.0.self_attn."


class FakeModel(torch.nn.Module):
    """Logits of a token from that token alone."""

    def __init__(self, seed: int):
        super().__init__()
        self.config = object()  # Megatron's models have one too, and it is not one of transformers
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.factors = torch.nn.ParameterDict()
        for name in ("q_proj", "v_proj"):
            down = torch.randn(RANK, HIDDEN_SIZE, generator=generator) / math.sqrt(HIDDEN_SIZE)
            self.factors[f"{name}_A"] = torch.nn.Parameter(down)
            self.factors[f"{name}_B"] = torch.nn.Parameter(torch.zeros(HIDDEN_SIZE, RANK))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.table[input_ids]
        for name in ("q_proj", "v_proj"):
            hidden = hidden + hidden @ self.factors[f"{name}_A"].T @ self.factors[f"{name}_B"].T
        return hidden @ self.table.T


class FakeBackend:
    """See the module; `calls` records the batches of run_step, `poison` maps a call number to "loss" or "grad"."""

    def __init__(self, model="fake", args=None, peft_config=None):
        self.model = FakeModel(args.seed if args is not None else 0)
        self.base_model_name = str(model)
        self.hf_config = None
        self.linear_names = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "lm_head"]
        self.rank = self.data_parallel_rank = 0
        self.world_size = self.data_parallel_size = self.context_parallel_size = 1
        self.parameters = {
            f"{PREFIX}{name[:-2]}.lora_{name[-1]}.weight": parameter for name, parameter in self.model.factors.items()
        }
        self.num_active_weights = sum(parameter.numel() for parameter in self.model.parameters())
        self.calls: list[PackedBatch] = []
        self.poison: dict[int, str] = {}

    def run_step(self, batch: PackedBatch) -> StepResult:
        """Compute gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        result, loss = self._forward(batch)
        loss.backward()
        self.calls.append(batch)
        kind = self.poison.get(len(self.calls))
        if kind == "grad":
            next(iter(self.parameters.values())).grad[0, 0] = math.inf
        if kind == "loss":
            return StepResult(loss=math.nan, num_loss_tokens=batch.num_loss_tokens, num_correct=0, entropy=math.nan)
        return result

    def eval_step(self, batch: PackedBatch) -> StepResult:
        """Compute the loss."""
        with torch.no_grad():
            return self._forward(batch)[0]

    def _forward(self, batch: PackedBatch) -> tuple[StepResult, torch.Tensor]:
        loss, correct, entropy = torch.zeros(()), 0, 0.0
        for row in batch.rows:
            slots = np.flatnonzero(row.loss_weights)
            logits = self.model(torch.from_numpy(row.input_ids[slots].astype(np.int64)))
            labels = torch.from_numpy(row.labels[slots].astype(np.int64))
            weights = torch.from_numpy(row.loss_weights[slots])
            loss = loss + (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
            correct += int(((logits.argmax(-1) == labels) * weights).sum())
            entropy += float((torch.distributions.Categorical(logits=logits.detach()).entropy() * weights).sum())
        loss = loss / batch.num_loss_tokens
        result = StepResult(
            loss=float(loss.detach()),
            num_loss_tokens=batch.num_loss_tokens,
            num_correct=correct,
            entropy=entropy / batch.num_loss_tokens,
        )
        return result, loss

    def grad_norm(self) -> float:
        """Return the 2-norm."""
        grads = [p.grad.double().square().sum() for p in self.parameters.values() if p.grad is not None]
        return float(torch.stack(grads).sum().sqrt())

    def scale_grads(self, factor: float) -> None:
        """Multiply gradients."""
        for parameter in self.parameters.values():
            parameter.grad.mul_(factor)

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the factors."""
        return {key: parameter.detach().clone() for key, parameter in self.parameters.items()}

    def load_adapter(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the factors."""
        if set(state) != set(self.parameters):
            raise ExportError(f"keys differ: {set(state) ^ set(self.parameters)}")
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(state[key])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return copies of the moments."""
        return {
            f"{name}/{key}": value.detach().clone()
            for key, parameter in self.parameters.items()
            for name, value in optimizer.state.get(parameter, {}).items()
        }

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
        """Set the moments."""
        for full_key, value in state.items():
            name, _, key = full_key.partition("/")
            optimizer.state[self.parameters[key]][name] = value.clone()

    def close(self) -> None:
        """Do nothing."""
