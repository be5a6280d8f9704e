"""ChatTransform: only assistant text is learned, all of it, for every template, format and shape of conversation."""

import copy
import json
import math
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from datasets.fingerprint import Hasher
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.encoding import TextEncoder
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.errors import ConfigError, DataError
from tests.helpers.assets import load_conversations, load_tokenizer
from tests.helpers.chats import (
    PLAIN_SHAPES,
    TEMPLATES,
    TOOL_SHAPE,
    TOOLS,
    assistant,
    learned_texts,
    tokenize,
    user,
)

TAGGED = ("llama3_training", "qwen2_5_training", "qwen3_training")


def expected_text(template, message):
    """Return by hand what a template writes for a learned assistant turn, its header left out."""
    content = message["content"]
    if "tool_calls" in message:
        function = message["tool_calls"][0]["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        block = f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
        content = f"{content}\n{block}" if content else block
    return {
        "llama3_training": content.strip() + "<|eot_id|>",
        "mistral_nemo": content + "</s>",
        "qwen2_5_training": "\n" + content + "<|im_end|>\n",
        "qwen3_training": "<think>\n\n</think>\n\n" + content.lstrip("\n") + "<|im_end|>\n",
        "smollm2": content + "<|im_end|>",
    }[template]


FREE_SHAPES = {
    "empty turn": [user("Hi"), assistant(""), user("And?"), assistant("Bye.")],
    "assistant turns in a row": [user("Hi"), assistant("One."), assistant("Two."), user("And?"), assistant("Three.")],
    "whitespace at the edges": [user(" Hi "), assistant("\n  a \n\n"), user(" \n"), assistant("\tb")],
}


@pytest.mark.parametrize(
    "template", ["llama3_training", "mistral_nemo", "qwen2_5_training", "qwen3_training", "smollm2"]
)
@pytest.mark.parametrize("shape", [*PLAIN_SHAPES, *FREE_SHAPES])
def test_all_learns_exactly_the_assistant_turns(template, shape):
    if template == "mistral_nemo" and (shape not in PLAIN_SHAPES or shape == "system first"):
        pytest.skip("Mistral's template refuses this shape or drops the system text")
    messages = {**PLAIN_SHAPES, **FREE_SHAPES}[shape]
    tokenizer = load_tokenizer(template)
    [example] = tokenize([{"messages": messages}], tokenizer)
    expected = [expected_text(template, message) for message in messages if message["role"] == "assistant"]
    assert learned_texts(example, tokenizer) == expected
    assert tokenizer.decode(example["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("template", ["qwen2_5_training", "qwen3_training"])
def test_tool_calls_are_learned_and_tool_results_are_not(template):
    tokenizer = load_tokenizer(template)
    [example] = tokenize([{"messages": TOOL_SHAPE, "tools": TOOLS}], tokenizer)
    assert learned_texts(example, tokenizer) == [expected_text(template, TOOL_SHAPE[turn]) for turn in (1, 3)]


@pytest.mark.parametrize("template", TAGGED)
@pytest.mark.parametrize("data", ["bfcl", "tau", "mtbench"])
def test_tokens_and_mask_equal_transformers_on_real_conversations(template, data):
    rows = load_conversations(data)
    if template == "llama3_training":
        plain = {"user", "assistant", "system"}
        rows = [{"messages": [m for m in row["messages"] if m["role"] in plain and m["content"]]} for row in rows]
        rows = [row for row in rows if any(m["role"] == "assistant" for m in row["messages"])]
        if not rows:
            pytest.skip("bfcl has no assistant text, and Llama's template renders no tool calls")
    tokenizer = load_tokenizer(template)
    for example, row in zip(tokenize(rows, tokenizer), rows, strict=True):
        oracle = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        assert example["input_ids"].tolist() == oracle["input_ids"]
        assert example["loss_mask"].tolist() == oracle["assistant_masks"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("data", ["bfcl", "tau", "mtbench"])
def test_each_learns_what_follows_the_generation_prompt(template, data):
    """The context of every example is the very text that the model sees at inference; the rest is learned."""
    tokenizer = load_tokenizer(template)
    rows = load_conversations(data)
    takes_tools = template.startswith("qwen") or (template, data) == ("mistral_nemo", "tau")
    if data != "mtbench" and not takes_tools:
        with pytest.raises(DataError, match="row 0"):
            tokenize(rows, tokenizer, assistant_mask="each")
        return
    examples = tokenize(rows, tokenizer, assistant_mask="each")
    turns = [(r, t) for r, row in enumerate(rows) for t, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    assert [(example["conversation_id"], example["turn"]) for example in examples] == turns
    for example, (row, turn) in zip(examples, turns, strict=True):
        messages, tools = rows[row]["messages"], rows[row].get("tools")
        prompt = tokenizer.apply_chat_template(messages[:turn], tools=tools, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(messages[: turn + 1], tools=tools, tokenize=False)
        [learned] = learned_texts(example, tokenizer)
        assert tokenizer.decode(example["input_ids"]).rstrip() == (prompt + learned).rstrip()
        assert whole.rstrip().endswith(learned.rstrip())
        assert tokenizer.eos_token in learned


@pytest.mark.parametrize("template", ["qwen2_5_training", "qwen3", "smollm2"])
def test_last_learns_only_the_last_assistant_turn(template):
    tokenizer = load_tokenizer(template)
    rows = load_conversations("mtbench")
    whole = tokenize(rows, tokenizer, assistant_mask="last")
    for example, row in zip(whole, rows, strict=True):
        [learned] = learned_texts(example, tokenizer)
        assert row["messages"][-1]["content"] + "<|im_end|>" in learned
        assert row["messages"][-2]["content"] not in learned


@pytest.mark.parametrize(("mask", "before"), [("all", "\n"), ("last", "\n"), ("each", "")])
def test_plain_text_of_the_prompt_inside_the_tags_is_learned_as_the_tags_say_but_not_by_each(mask, before):
    """The newline behind the header, of which tokens and mask under "all" are those of transformers."""
    tokenizer = load_tokenizer("qwen2_5_training")
    example = tokenize([{"messages": PLAIN_SHAPES["two turns"]}], tokenizer, assistant_mask=mask)[-1]
    assert learned_texts(example, tokenizer)[-1] == before + "Bye.<|im_end|>\n"


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
@pytest.mark.parametrize("mask", ["all", "each"])
def test_turns_flagged_as_not_trained_are_context_only(flag, mask):
    tokenizer = load_tokenizer()
    messages = [user("a"), assistant("one", **flag), user("b"), assistant("two", train=True, weight=1)]
    [example] = tokenize([{"messages": messages}], tokenizer, assistant_mask=mask)
    assert [text.strip() for text in learned_texts(example, tokenizer)] == ["two<|im_end|>"]
    bare = [{"role": m["role"], "content": m["content"]} for m in messages]
    assert tokenizer.decode(example["input_ids"]) == tokenizer.apply_chat_template(bare, tokenize=False)


@pytest.mark.parametrize("template", ["qwen2_5_training", "qwen3_training"])
def test_arguments_as_json_string_render_like_a_dict(template):
    """So do a tool list in one JSON string, a flat tool call, content in parts, and null fillers."""
    tokenizer = load_tokenizer(template)
    plain = {"messages": TOOL_SHAPE, "tools": TOOLS}
    other = copy.deepcopy(plain)
    function = other["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    other["messages"][0]["content"] = [{"type": "text", "text": "Fly "}, {"type": "text", "text": "me."}]
    other["messages"][1]["tool_calls"] = [{**function, "id": None}]
    other["messages"][1]["content"] = None
    other["messages"][3]["tool_calls"] = []
    other["tools"] = json.dumps(TOOLS)
    first, second = tokenize([plain, other], tokenizer)
    assert first["input_ids"].tolist() == second["input_ids"].tolist()
    assert first["loss_mask"].tolist() == second["loss_mask"].tolist()


@pytest.mark.parametrize("mask", ["all", "last", "each"])
def test_columnar_store_with_null_fillers_and_processes_changes_nothing(mask, tmp_path):
    """A datasets.Dataset gives every struct every key, filled with null; several processes give the same order."""
    rows = [*load_conversations("bfcl")[:6], *load_conversations("mtbench")]
    rows = [{"messages": row["messages"], "tools": json.dumps(row.get("tools", []))} for row in rows]
    stored = Dataset.from_list(rows)
    assert "tool_calls" in stored[7]["messages"][0]
    tokenizer = load_tokenizer()
    expected = tokenize(rows, tokenizer, assistant_mask=mask)
    num_proc = 2 if mask == "each" else None
    prepared = prepare_dataset(stored.with_format("numpy"), tokenizer, assistant_mask=mask, num_proc=num_proc)
    assert len(expected) == len(prepared) > 0
    for left, right in zip(expected, prepared, strict=True):
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[key], right[key]) for key in left)


def test_prepared_columns_are_the_contract_and_pass_through_again():
    tokenizer = load_tokenizer()
    first = prepare_dataset(load_conversations("mtbench"), tokenizer, assistant_mask="each")
    kinds = {name: str(getattr(feature, "feature", feature)) for name, feature in first.features.items()}
    assert kinds == {
        "input_ids": "Value('int32')",
        "loss_mask": "Value('uint8')",
        "conversation_id": "Value('int64')",
        "turn": "Value('int32')",
    }
    assert isinstance(first[0]["input_ids"], np.ndarray)
    again = prepare_dataset(first, tokenizer)
    assert len(again) == len(first)
    for left, right in zip(first, again, strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in left)


def test_overlong_policies_cut_count_and_keep_a_target(caplog):
    rows = [
        {"input_ids": list(range(10)), "loss_mask": mask}
        for mask in ([0] * 8 + [1] * 2, [0, 1] + [0] * 8, [0] * 4 + [1] * 2 + [0] * 4)
    ]
    rows.append({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]})
    with pytest.raises(DataError, match="row 0: 10 tokens are more than max_length=5"):
        tokenize(rows, max_length=5)

    def ids(policy):
        examples = tokenize(rows, max_length=5, overlong=policy)
        assert all(example["loss_mask"][1:].any() and not example["loss_mask"][0] for example in examples)
        return [example["input_ids"].tolist() for example in examples]

    assert ids("drop") == [[1, 2, 3]]
    assert ids("truncate_left") == [[5, 6, 7, 8, 9], [1, 2, 3]]
    assert ids("truncate_right") == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3]]
    logged = [record.getMessage() for record in caplog.records]
    assert [text.split(": ")[1][:50] for text in logged] == [
        "0 truncated, 3 dropped, 0 dropped because truncati",
        "1 truncated, 0 dropped, 2 dropped because truncati",
        "2 truncated, 0 dropped, 1 dropped because truncati",
    ]


def test_lengths_are_logged_with_their_spread(caplog):
    """The oracle counts by hand; of n sorted lengths the q-quantile is the ceil(q * n)-th."""
    caplog.set_level("INFO", logger="hf_megapack")
    rows = load_conversations("mtbench")
    lengths = sorted(len(example["input_ids"]) for example in tokenize(rows, assistant_mask="each"))
    [line] = [record.getMessage() for record in caplog.records if "Lengths" in record.getMessage()]
    at = [lengths[max(math.ceil(q * len(lengths)), 1) - 1] for q in (0, 0.25, 0.5, 0.75, 0.99, 1)]
    listed = [
        int(value.replace(",", "")) for value in re.findall(r"([\d,]+)(?:,|$)", line.split(";")[1].split("\n")[0])
    ]
    assert listed == at
    assert f"{len(lengths)} examples of {sum(lengths):,} tokens" in line
    bins = re.findall(r"([\d,]+): ([\d,]+)", line.split("\n")[1])
    upper = 0
    for high, count in ((int(high.replace(",", "")), int(count)) for high, count in bins):
        assert sum(upper < length <= high for length in lengths) == count
        upper = high
    assert upper >= lengths[-1]


def test_a_conversation_of_a_million_tokens_is_learned_whole_in_bounded_memory():
    """Memory is that of the tokenizer's result: some hundred bytes for a token, whatever the number of turns."""
    question, answer = "word " * 300_000, "Reply. " * 120_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [example] = tokenize([{"messages": [user(question), assistant(answer), user("More?"), assistant("No.")]}])
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    num_tokens = len(example["input_ids"])
    assert num_tokens > 1_000_000
    assert grown < 1_000 * num_tokens
    texts = learned_texts(example, load_tokenizer())
    expected = [expected_text("qwen2_5_training", assistant(text)) for text in (answer, "No.")]
    assert [text.strip() for text in texts] == [text.strip() for text in expected]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"assistant_mask": "first"}, "assistant_mask must be one of"),
        ({"overlong": "cut"}, "overlong must be one of"),
        ({"max_length": 1}, "max_length must be at least 2"),
    ],
)
def test_wrong_options_are_refused_by_name(options, problem):
    with pytest.raises(ConfigError, match=problem):
        ChatTransform(load_tokenizer(), **options)


def test_missing_and_multiple_templates_are_refused():
    tokenizer = load_tokenizer()
    tokenizer.chat_template = None
    ways = r"set tokenizer\.chat_template to .*ChatTransform as chat_template=, .*command line as --chat_template"
    with pytest.raises(ConfigError, match=f"has no chat template; {ways}"):
        tokenize([{"messages": [user("a"), assistant("b")]}], tokenizer)
    assert tokenize([{"text": "needs no template"}], tokenizer)
    tokenizer.chat_template = {"default": "x", "tool_use": "y"}
    with pytest.raises(ConfigError, match=rf"several chat templates .default, tool_use.; {ways}"):
        ChatTransform(tokenizer)


def test_fingerprint_depends_on_template_and_options_not_on_the_process():
    tokenizer = load_tokenizer()
    code = (
        "from datasets.fingerprint import Hasher; from tests.helpers.assets import load_tokenizer; "
        "from hf_megapack.data.chat import ChatTransform; print(Hasher.hash(ChatTransform(load_tokenizer())))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    mine = Hasher.hash(ChatTransform(tokenizer))
    assert other.stdout.strip() == mine
    used = load_tokenizer()
    used(["some text", "b"], truncation=True, max_length=3, padding=True)
    transform = ChatTransform(used)
    list(transform.tokenize([{"text": "x y z"}], [0], format_name="text"))
    assert Hasher.hash(transform) == mine
    changed = [
        ChatTransform(tokenizer, assistant_mask="each"),
        ChatTransform(tokenizer, max_length=100),
        ChatTransform(tokenizer, max_length=100, overlong="drop"),
        ChatTransform(tokenizer, chat_template=tokenizer.chat_template + " "),
        ChatTransform(load_tokenizer("qwen3")),
    ]
    assert len({mine, *map(Hasher.hash, changed)}) == 1 + len(changed)


def test_map_with_the_bare_transform_gives_only_the_contract_columns(caplog):
    stored = Dataset.from_list(
        [{"id": str(n), "messages": r["messages"]} for n, r in enumerate(load_conversations("mtbench"))]
    )
    transform = ChatTransform(load_tokenizer(), assistant_mask="each", max_length=200, overlong="drop")
    mapped = stored.map(transform, batched=True, with_indices=True, remove_columns=stored.column_names)
    assert mapped.column_names == ["input_ids", "loss_mask", "conversation_id", "turn"]
    assert 0 < len(mapped) < 17
    assert max(map(len, mapped["input_ids"])) <= 200
    assert "dropped" in caplog.text


def test_offsets_with_trimmed_whitespace_give_the_same_mask():
    """Tokenizers of the GPT-2 kind leave leading spaces out of their offsets, so a lone space has no width."""
    plain, trimmed = load_tokenizer(), load_tokenizer()
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chats = [{"messages": messages} for messages in [*PLAIN_SHAPES.values(), *FREE_SHAPES.values()]]
    pairs = [{"prompt": "one  ", "completion": "  two  "}, {"prompt": "one", "completion": "   "}]
    for rows in (chats, pairs):
        for left, right in zip(tokenize(rows, plain), tokenize(rows, trimmed), strict=True):
            assert left["input_ids"].tolist() == right["input_ids"].tolist()
            assert left["loss_mask"].tolist() == right["loss_mask"].tolist()


PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<think>", "ab", " ", "\n", "e\u0301", "\U0001f9ec", "<|im_", "x" * 150]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=8), min_size=2, max_size=5), st.lists(PIECES, max_size=4))
def test_shared_beginnings_are_tokenized_as_if_alone(tails, start):
    """Neighbouring texts reuse tokens up to their last common control token; ids and offsets must not show it."""
    encoder = TextEncoder(TOKENIZER.backend_tokenizer.to_str())
    beginning = "".join(start) + "y" * 200 + "<|im_end|>\n"
    texts = [beginning + "".join(tail) for tail in tails]
    for text, (ids, offsets) in zip(texts, encoder.encode(texts, add_special_tokens=False), strict=True):
        alone = TOKENIZER(text, return_offsets_mapping=True, add_special_tokens=False)
        assert ids.tolist() == alone["input_ids"]
        assert offsets.tolist() == [list(pair) for pair in alone["offset_mapping"]]


TEXT = st.text(st.sampled_from("ab \n\u00e9\u9f98\U0001f9ec<>|{}\"'"), max_size=12)


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(TEXT)))
        messages.extend(assistant(draw(TEXT)) for _ in range(draw(st.integers(1, 2))))
    return messages


@settings(max_examples=60, deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=5), st.sampled_from(["qwen2_5_training", "smollm2"]))
def test_any_conversation_learns_its_assistant_text_and_nothing_else(many, template):
    rows = [{"messages": messages} for messages in many]
    examples = list(TRANSFORMS[template].tokenize(rows, range(len(rows)), format_name="messages"))
    assert len(examples) == len(many)
    for example, messages in zip(examples, many, strict=True):
        texts = learned_texts({"input_ids": example.input_ids, "loss_mask": example.loss_mask}, TOKENIZER)
        expected = [expected_text(template, message) for message in messages if message["role"] == "assistant"]
        assert texts == expected


TOKENIZER = load_tokenizer()
TRANSFORMS = {name: ChatTransform(load_tokenizer(name)) for name in ("qwen2_5_training", "smollm2")}
