"""Load the small tokenizer, chat templates and real conversations under `tests/assets`, offline."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

ASSETS = Path(__file__).resolve().parent.parent / "assets"

# Templates that close a turn with another token than the tokenizer file's `<|im_end|>`.
_EOS_TOKENS = {"llama3_training": "<|eot_id|>", "mistral_nemo": "</s>"}


def template_names() -> list[str]:
    """Return the names that `load_tokenizer(template=...)` takes, sorted."""
    return sorted(path.stem for path in (ASSETS / "templates").glob("*.jinja"))


def load_template(name: str) -> str:
    """Return the text of `tests/assets/templates/<name>.jinja`."""
    return (ASSETS / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def load_tokenizer(template: str = "qwen2_5_training") -> PreTrainedTokenizerBase:
    """Return a fresh 4,096-token tokenizer with the named chat template and its end-of-turn token."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    tokenizer.chat_template = load_template(template)
    tokenizer.eos_token = _EOS_TOKENS.get(template, tokenizer.eos_token)
    return tokenizer


def load_conversations(name: str) -> list[dict]:
    """Return the rows of `tests/assets/conversations/<name>.jsonl`.

    Args:
        name: "bfcl" (10 tool-call rows), "tau" (4 long tool-agent rows) or "mtbench" (6 plain chats).
    """
    lines = (ASSETS / "conversations" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
