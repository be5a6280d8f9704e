"""What the GPU benchmarks share: model shapes, examples kept in one small file, settings from the command line.

The machine with the GPU may have neither the conversations nor a tokenizer, so `store_examples` writes tokens and
masks once: of each example only what its predecessor does not begin with, since the turns of a conversation repeat it.
"""

import argparse
import ast
import dataclasses
import os
import platform
import resource
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config

IGNORED = -100
FILE_LIMIT = 8_000_000
NOMINAL_TFLOPS = 989  # dense bfloat16 of an H100 or H200 SXM, by NVIDIA's datasheet
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "accelerate",
    "megatron-core",
    "transformer-engine",
    "trl",
    "liger-kernel",
    "flash-attn-4",
)
# Qwen3-8B's sizes, and a model that a CPU trains in seconds with the same vocabulary.
SHAPES = {
    "qwen3_8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    },
}


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One conversation up to a turn.

    Attributes:
        input_ids: int32, shape (num_tokens,).
        loss_mask: True where the token is learned. bool, same shape.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray


def model_config(shape: str, num_layers: int | None = None) -> Qwen3Config:
    """Return the configuration of a shape, with fewer layers if asked for."""
    sizes = dict(SHAPES[shape])
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    return Qwen3Config(
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **sizes,
    )


def lora_config() -> LoraConfig:
    """Return the adapter that every side trains."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def no_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of two words: trainers ask for one, and the examples are tokens already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def store_examples(path: Path, sets: dict[str, Sequence[Example]]) -> None:
    """Write named lists of examples into one file.

    Args:
        path: The .npz file.
        sets: The lists.

    Raises:
        SystemExit: If the file is larger than FILE_LIMIT bytes; it is removed.
    """
    arrays = {}
    for name, examples in sets.items():
        before, kept, rests = np.zeros(0, np.int32), [], []
        for example in examples:
            size = min(before.size, example.input_ids.size)
            same = before[:size] == example.input_ids[:size]
            kept.append(size if same.all() else int(same.argmin()))
            rests.append(example.input_ids[kept[-1] :])
            before = example.input_ids
        arrays[f"{name}.kept"] = np.array(kept, np.int32)
        arrays[f"{name}.sizes"] = np.array([example.input_ids.size for example in examples], np.int32)
        arrays[f"{name}.tokens"] = np.concatenate(rests).astype(np.int32)
        arrays[f"{name}.masks"] = np.packbits(np.concatenate([example.loss_mask for example in examples]))
    np.savez_compressed(path, **arrays)
    if path.stat().st_size > FILE_LIMIT:
        size = path.stat().st_size
        path.unlink()
        raise SystemExit(f"{path} would take {size:,} bytes, more than {FILE_LIMIT:,}: store fewer examples.")


def load_examples(path: Path, name: str) -> list[Example]:
    """Read one list of `store_examples`.

    Args:
        path: The .npz file.
        name: The list.

    Raises:
        SystemExit: If the file has no such list.
    """
    with np.load(path) as stored:
        if f"{name}.kept" not in stored:
            names = sorted({key.partition(".")[0] for key in stored})
            raise SystemExit(f"{path} has no examples {name!r}; it has {', '.join(names)}.")
        kept, sizes, tokens, masks = (stored[f"{name}.{key}"] for key in ("kept", "sizes", "tokens", "masks"))
    rests = np.split(tokens, np.cumsum(sizes - kept)[:-1])
    flags = np.split(np.unpackbits(masks, count=int(sizes.sum())).astype(bool), np.cumsum(sizes)[:-1])
    examples, before = [], np.zeros(0, np.int32)
    for count, rest, mask in zip(kept, rests, flags, strict=True):
        before = np.concatenate((before[:count], rest))
        examples.append(Example(before, mask))
    return examples


def as_dataset(examples: Sequence[Example]) -> Dataset:
    """Return examples as the columns that trainers take: input_ids, and labels that are not shifted."""
    labels = [np.where(e.loss_mask, e.input_ids, IGNORED) for e in examples]
    return Dataset.from_dict({"input_ids": [e.input_ids for e in examples], "labels": labels})


def num_tokens(examples: Sequence[Example]) -> int:
    """Return the tokens of all examples."""
    return sum(example.input_ids.size for example in examples)


def parse_settings(pairs: Sequence[str]) -> dict[str, object]:
    """Turn key=value pairs into keyword arguments.

    Args:
        pairs: Values are Python literals, true, false, none, or else text.

    Raises:
        SystemExit: If a pair has no "=".
    """
    words = {"true": True, "false": False, "none": None}
    settings = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise SystemExit(f"{pair!r} is not of the form key=value.")
        try:
            settings[key] = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[key] = text
    return settings


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model."""
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3_8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")


def describe_machine() -> str:
    """Return device and versions in one line."""
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        device = f"no GPU, {os.cpu_count()} cores of {platform.machine()}"
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return f"{device}; Python {platform.python_version()}, {', '.join(found)}"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Return the most memory that tensors took on the GPU since the peak was reset, or that the process took."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reset_peak() -> None:
    """Forget the GPU memory that building a model took."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
