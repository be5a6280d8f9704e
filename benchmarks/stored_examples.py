"""Tokens and masks of real conversations in one small file, for a machine that has neither them nor a tokenizer.

Of each example only that is kept with which its predecessor does not begin: the turns of a conversation repeat it.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer

from hf_megapack.data.chat import ChatTransform

IGNORED = -100
FILE_LIMIT = 8_000_000
FILES = {"tau": "tau_airline.jsonl", "mtbench": "mtbench101.jsonl"}


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One conversation up to a turn.

    Attributes:
        input_ids: int32, shape (num_tokens,).
        loss_mask: True where the token is learned. bool, same shape.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray


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


def prepare(path: Path, folder: Path) -> None:
    """Render and tokenize, one example per assistant turn, and write the file.

    Args:
        path: The .npz file.
        folder: Holds the conversations, `tokenizers/qwen3` and `templates/qwen2_5_training.jinja`.

    Raises:
        SystemExit: If the file would be too large, or what is read back differs.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizers" / "qwen3")
    template = (folder / "templates" / "qwen2_5_training.jinja").read_text(encoding="utf-8")
    transform = ChatTransform(tokenizer, assistant_mask="each", chat_template=template)
    sets = {}
    for name, file in FILES.items():
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        found = transform.tokenize(rows, range(len(rows)), format_name="messages")
        sets[name] = [Example(e.input_ids.astype("int32"), e.loss_mask.astype(bool)) for e in found]
        total = num_tokens(sets[name])
        longest = max(e.input_ids.size for e in sets[name])
        print(f"{name}: {len(sets[name])} examples, {total:,} tokens, the longest has {longest:,}")
    store_examples(path, sets)
    for name, examples in sets.items():
        for before, after in zip(examples, load_examples(path, name), strict=True):
            if (before.input_ids != after.input_ids).any() or (before.loss_mask != after.loss_mask).any():
                raise SystemExit(f"{name} is not what was stored.")
    print(f"{path}: {path.stat().st_size:,} bytes")
