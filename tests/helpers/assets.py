"""Load the small tokenizer, chat templates and real conversations under `tests/assets`, offline."""

import json
import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

ASSETS = Path(__file__).resolve().parent.parent / "assets"
# A folder with the configuration of a small Llama of 512 positions, and no weights.
MODEL = str(ASSETS / "model")

# Beginnings of the names of templates that open a text, or close a turn, with other tokens than the tokenizer's own.
_BOS_TOKENS = {
    "deepseek": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "gemma": "<bos>",
    "llama3": "<|begin_of_text|>",
    "mistral": "<s>",
}
_EOS_TOKENS = {
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "gemma": "<end_of_turn>",
    "glm": "<|endoftext|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "nemotron_nano": "<SPECIAL_12>",
    "phi3": "<|endoftext|>",
}
_CONTROL_TOKEN = re.compile(
    r"<\|\w+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|<SPECIAL_\d+>|\[gMASK\]|<sop>|\[/?[A-Z_]+\](?=[\"'{])"
)


def template_names() -> list[str]:
    """Return the names that `load_tokenizer(template=...)` takes, sorted."""
    return sorted(path.stem for path in (ASSETS / "templates").glob("*.jinja"))


def load_template(name: str) -> str:
    """Return the text of `tests/assets/templates/<name>.jinja`."""
    return (ASSETS / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def load_tokenizer(template: str = "qwen2_5_training", folder: Path | None = None) -> PreTrainedTokenizerBase:
    """Return a fresh tokenizer with the named chat template, its control tokens and its end-of-turn token.

    Args:
        template: A name of `template_names`.
        folder: Another tokenizer than the small one of 4,096 tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder or ASSETS / "tokenizer")
    tokenizer.chat_template = load_template(template)
    eos = _of(template, _EOS_TOKENS) or "<|im_end|>"
    special = set(tokenizer.all_special_tokens) | {
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    missing = {*_CONTROL_TOKEN.findall(tokenizer.chat_template), eos, _of(template, _BOS_TOKENS) or eos} - special
    if missing:
        tokenizer.add_tokens(sorted(missing), special_tokens=True)
    tokenizer.eos_token = eos
    if bos := _of(template, _BOS_TOKENS):
        tokenizer.bos_token = bos
    return tokenizer


def _of(template: str, table: dict[str, str]) -> str | None:
    return next((token for beginning, token in table.items() if template.startswith(beginning)), None)


def load_conversations(name: str) -> list[dict]:
    """Return the rows of `tests/assets/conversations/<name>.jsonl`.

    Args:
        name: "bfcl" (10 tool-call rows), "tau" (4 long tool-agent rows) or "mtbench" (6 plain chats).
    """
    lines = (ASSETS / "conversations" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
