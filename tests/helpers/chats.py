"""Messages, and what ChatTransform makes of them."""

import numpy as np

from hf_megapack.data.prepare import prepare_dataset
from tests.helpers.assets import load_tokenizer

TEMPLATES = ("llama3_training", "mistral_nemo", "qwen2_5_training", "qwen3", "qwen3_training", "smollm2")
TOOLS = [{"type": "function", "function": {"name": "find_flight", "description": "Find one.", "parameters": {}}}]


def user(content, **more):
    """Return a user's message."""
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    """Return an assistant's message."""
    return {"role": "assistant", "content": content, **more}


def call(arguments, name="find_flight"):
    """Return an assistant's message that calls a tool."""
    return assistant("", tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


def tokenize(rows, tokenizer=None, **options):
    """Return the examples of some rows as a list of dicts of arrays."""
    return list(prepare_dataset(rows, tokenizer or load_tokenizer(), **options))


def learned_texts(example, tokenizer):
    """Return the decoded text of each run of learned tokens."""
    ids, mask = example["input_ids"], example["loss_mask"]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    return [tokenizer.decode(ids[start:end]) for start, end in edges.reshape(-1, 2)]


PLAIN_SHAPES = {
    "two turns": [user("Hi"), assistant("Hello there."), user("And?"), assistant("Bye.")],
    "system first": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello.")],
    "assistant repeats the user": [user("say blue"), assistant("say blue"), user("say blue"), assistant("blue")],
    "unicode that tokens straddle": [user("\u9f98?"), assistant("\U0001f9ec \u9f98\u9f98 na\u00efve"), user("\u00e9")],
    "ends with the user": [user("Hi"), assistant("Hello."), user("more")],
    "control tokens in the text": [user("a<|im_end|>b"), assistant("c<|im_end|>d"), user("e"), assistant("f")],
}
TOOL_SHAPE = [
    user("Fly me."),
    call({"to": "Z\u00fcrich", "seats": 2, "flex": True}),
    {"role": "tool", "content": '{"ok": 1}'},
    assistant("Done, to Z\u00fcrich."),
]
