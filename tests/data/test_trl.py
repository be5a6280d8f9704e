"""Masks beside those of TRL's `assistant_only_loss`, for every template of which TRL has a version to train on.

Equal, or different for a reason that the table names; a template that TRL adds later is a failure until it has a row.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import trl
from datasets import Dataset
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template

from hf_megapack.data.chat import ChatTransform
from hf_megapack.errors import DataError
from tests.helpers.assets import ASSETS, load_conversations

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_flight",
            "description": "Find one.",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "description": "How many."}},
                "required": ["n"],
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "find_flight", "arguments": {"n": 2}}}])
RESULT = {"role": "tool", "name": "find_flight", "content": '{"flights": 2}'}
# In the order of the letters in OUTCOMES.
SHAPES = {
    "chat": ([user("Hi"), assistant("Hello there."), user("Bye"), assistant("Good\nbye")], None),
    "system": ([{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello.")], None),
    "two in a row": ([user("Hi"), assistant("One."), assistant("Two.")], None),
    "reasoning": ([user("1?"), assistant("4", reasoning_content="2+2"), user("2?"), assistant("5")], None),
    "tools": ([user("Fly"), CALL, RESULT, assistant("Done.")], TOOLS),
    "calls": ([user("Fly"), CALL, RESULT, assistant("Done.")], None),
}
# Per shape: = equal masks; h equal but for the header, which TRL learns though the generation prompt has written it;
# r, t, c, p refused because the template leaves out the reasoning, the tools, a tool call or the plain text of a turn,
# all of which TRL trains without; x the template itself raises, for TRL too.
OUTCOMES = {
    "cohere": "==xrxx",
    "cohere2": "==xrxx",
    "deepseek_r1_distill": "hhhrtc",
    "deepseekv3": "hhhrth",
    "diffusion_gemma": "===r==",
    "gemma": "=xxrxx",
    "gemma3": "==xrxx",
    "glm4moe": "===r==",
    "gptoss": "hhhrhh",
    "idefics3": "ppppxx",
    "lfm2": "===rcc",
    "lfm2_v2": "===r==",
    "llama3": "===rtc",
    "llava_next": "xxxxxx",
    "muse_glimmer": "hhhhhh",
    "nemotron_3_5_lightning": "===r==",
    "nemotron_3_nano": "===r==",
    "nemotron_3_super": "===r==",
    "nemotron_3_ultra": "===r==",
    "phi3": "===rtc",
    "phi3_5": "===rtc",
    "qwen2_5": "===r==",
    "qwen2_5_vl": "===rtc",
    "qwen3": "======",
    "qwen3_5_nothink": "======",
    "qwen3_5_think": "======",
    "qwen3_6": "======",
    "qwen3_8": "======",
    "qwen3_instruct_2507": "===r==",
    "qwen3_vl": "===r==",
    "smolvlm": "ppppxx",
}
REASONS = {
    "r": r"leaves out the reasoning of this turn",
    "t": r"leaves out every one of the given tools",
    "c": r"leaves out the name of tool call 'find_flight'",
    "p": r"leaves out the text of this turn",
    "x": r"cannot render this conversation",
}
# Texts that a template writes as one token.
_CONTROL = re.compile(r"<\|[\w/]+\|?>|<\uff5c[^\uff5c'\"]+\uff5c>|<\w+\|>|<(?:start|end)_of_\w+>|</s>|\[gMASK\]|<sop>")


def load_stock(name: str) -> PreTrainedTokenizerBase:
    """Return the small tokenizer with a stock template of TRL's collection and the template's control tokens."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    missing = set(_CONTROL.findall(tokenizer.chat_template)) - set(tokenizer.all_special_tokens)
    tokenizer.add_tokens(sorted(missing), special_tokens=True)
    return tokenizer


def by_trl(tokenizer, template, messages, tools) -> tuple[list[int], list[int]]:
    """Return ids and mask from the call that TRL's `_tokenize` makes."""
    result = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return result["input_ids"], result["assistant_masks"]


def by_us(tokenizer, template, messages, tools) -> tuple[list[int], list[int]]:
    """Return ids and mask of the one example."""
    row = {"messages": [messages], **({"tools": [tools]} if tools else {})}
    columns = ChatTransform(tokenizer, chat_template=template)(row, [0])
    return columns["input_ids"][0].tolist(), columns["loss_mask"][0].tolist()


def test_every_template_that_trl_patches_has_a_row():
    patched = {path.stem.removesuffix("_training") for path in TEMPLATES.glob("*_training.jinja")}
    assert patched == set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_masks_are_those_of_trl_or_differ_as_the_table_says(name):
    tokenizer = load_stock(name)
    template = get_training_chat_template(tokenizer)
    assert template == (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
    for letter, (shape, (messages, tools)) in zip(OUTCOMES[name], SHAPES.items(), strict=True):
        if letter == "x":
            with pytest.raises(TemplateError):
                by_trl(tokenizer, template, messages, tools)
        if letter in REASONS:
            with pytest.raises(DataError, match=REASONS[letter]):
                by_us(tokenizer, template, messages, tools)
            continue
        expected_ids, expected_mask = by_trl(tokenizer, template, messages, tools)
        ids, mask = by_us(tokenizer, template, messages, tools)
        assert ids == expected_ids, shape
        assert sum(mask) > 0, shape
        if letter == "=":
            assert mask == expected_mask, shape
        else:
            check_only_headers_differ(ids, (mask, expected_mask), tokenizer, template, SHAPES[shape])


def check_only_headers_differ(ids, masks, tokenizer, template, conversation):
    """Each run of tokens that TRL alone learns ends before an answer; a generation prompt wrote all up to there."""
    messages, tools = conversation
    ours, theirs = (np.array(mask) for mask in masks)
    assert (ours <= theirs).all()
    edges = np.flatnonzero(np.diff(np.concatenate(([0], theirs - ours, [0])))).reshape(-1, 2)
    assert len(edges) > 0
    prompts = [
        tokenizer.apply_chat_template(
            messages[:turn], tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    for end in edges[:, 1]:
        assert ours[end] == 1
        assert any(prompt.startswith(tokenizer.decode(ids[:end])) for prompt in prompts), tokenizer.decode(ids[:end])


@pytest.mark.filterwarnings("ignore")
def test_the_call_is_what_trls_trainer_makes(tmp_path):
    """Real conversations through SFTTrainer, which puts its training template in the place of the stock one."""
    tokenizer = load_stock("qwen2_5")
    rows = [{"messages": row["messages"]} for row in load_conversations("mtbench")]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = trl.SFTConfig(
        str(tmp_path), assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False, report_to="none"
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes))
    trainer = trl.SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    template = get_training_chat_template(tokenizer)
    for row, prepared in zip(rows, trainer.train_dataset, strict=True):
        ids, mask = by_us(tokenizer, template, row["messages"], None)
        assert prepared["input_ids"] == ids
        assert prepared["labels"] == [token if learned else -100 for token, learned in zip(ids, mask, strict=True)]
