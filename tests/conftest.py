"""Fixtures that several test files share, and nothing else."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from tests.helpers import spawn
from tests.helpers.assets import load_conversations, load_tokenizer


@pytest.fixture
def tiny_tokenizer():
    """A 4,096-token tokenizer with a training template."""
    return load_tokenizer()


@pytest.fixture
def make(tmp_path, tiny_tokenizer):
    """Return a function that builds a trainer over ready examples, with a backend in plain torch."""
    # Imports the trainer, which most test files do without.
    from tests.helpers.fake_trainer import build_trainer

    return partial(build_trainer, tmp_path / "run", tiny_tokenizer)


@pytest.fixture
def chat_examples():
    """Six short multi-turn chats."""
    return load_conversations("mtbench")


@pytest.fixture
def tiny_hf_config():
    """A Llama of two layers for the small tokenizer."""
    return LlamaConfig(
        vocab_size=4608,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )


@pytest.fixture
def free_port():
    """A TCP port that nothing listens on."""
    return spawn.free_port()


@pytest.fixture(autouse=True)
def _enough_gpus(request):
    """Skip a test that needs more GPUs than there are."""
    marker = request.node.get_closest_marker("multi_gpu")
    needed = marker.args[0] if marker else 1 if request.node.get_closest_marker("gpu") else 0
    if needed > torch.cuda.device_count():
        pytest.skip(f"needs {needed} GPUs, found {torch.cuda.device_count()}")
