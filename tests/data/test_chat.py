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
from datasets import Dataset, IterableDataset
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
    call,
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


def without_header_newline(template, texts, messages):
    """Return learned texts less the header's newline where one token holds it and the first newline of the answer."""
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert len(texts) == len(answers)
    is_straddled = [template == "smollm2" and answer.startswith("\n") for answer in answers]
    return [text[1:] if straddled else text for text, straddled in zip(texts, is_straddled, strict=True)]


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
    assert without_header_newline(template, learned_texts(example, tokenizer), messages) == expected
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


def test_prompt_completion_messages_learn_the_completion_only():
    tokenizer = load_tokenizer()
    row = {"prompt": [user("a"), assistant("shown"), user("b")], "completion": [assistant("one"), user("c")]}
    row["completion"].append(assistant("two"))
    [example] = tokenize([row], tokenizer)
    assert [text.strip() for text in learned_texts(example, tokenizer)] == ["one<|im_end|>", "two<|im_end|>"]
    assert [example["turn"] for example in tokenize([row], tokenizer, assistant_mask="each")] == [3, 5]


def test_plain_text_ends_with_a_learned_end_token():
    tokenizer = load_tokenizer()
    pair, ended = tokenize(
        [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "a", "completion": " b<|im_end|>"}], tokenizer
    )
    assert learned_texts(pair, tokenizer) == [" blue.<|im_end|>"]
    assert tokenizer.decode(pair["input_ids"]) == "The sky is blue.<|im_end|>"
    assert learned_texts(ended, tokenizer) == [" b<|im_end|>"]
    [text] = tokenize([{"text": "The sky is blue."}], tokenizer)
    assert text["loss_mask"].tolist() == [0] + [1] * (len(text["input_ids"]) - 1)


@pytest.mark.parametrize("row", [{"text": "The sky is blue."}, {"prompt": "The sky", "completion": " is blue."}])
def test_plain_text_without_an_end_of_text_token_is_refused(row):
    tokenizer = load_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"tokenizer .* has no eos_token; set tokenizer.eos_token to the token that"):
        tokenize([row], tokenizer)
    assert tokenize([{"messages": [user("a"), assistant("b")]}], tokenizer)


def test_sharegpt_turns_are_messages():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    [example] = tokenize([row])
    [same] = tokenize([{"messages": [user("Hi"), assistant("Hello.")]}])
    assert example["input_ids"].tolist() == same["input_ids"].tolist()


def test_ready_tokens_lose_padding_and_the_target_at_index_0():
    labels, masked = (
        tokenize([{"input_ids": [5, 6, 7, 8, 0], "attention_mask": [1, 1, 1, 1, 0], **targets}])[0]
        for targets in ({"labels": [5, -100, 7, 8, -100]}, {"loss_mask": [1, 0, 1, 1, 0]})
    )
    for example in (labels, masked):
        assert example["input_ids"].tolist() == [5, 6, 7, 8]
        assert example["loss_mask"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input_ids": [5, 6], "labels": [-100, 7]}, "row 0: label 7 at index 1 is neither -100 nor the token"),
        ({"input_ids": [5, 6], "labels": [-100, -100]}, "row 0: no token is left to learn"),
        ({"input_ids": [5, 6], "labels": [5, -100]}, "row 0: no token is left to learn"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "loss_mask may hold only 0 and 1"),
        (
            {"input_ids": [5, 6], "loss_mask": [0, 1], "conversation_id": "abc"},
            "row 0: conversation_id must be a whole",
        ),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "turn": 1.7}, "row 0: turn must be a whole number, got float 1.7"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [0, 1]}, "run of ones from index 0"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [1, 0]}, "padding to be learned"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "differ in length"),
        ({"input_ids": [], "loss_mask": []}, "one or more token ids"),
        ({"input_ids": [0.5, 1.0], "loss_mask": [0, 1]}, "flat list of integers"),
        ({"messages": []}, "row 0: messages must be a non-empty list"),
        ({"messages": ["hi"]}, "row 0, turn 0: a message must be a dict"),
        ({"messages": [{"content": "hi"}]}, "turn 0: a message needs a role"),
        ({"messages": [user("a"), assistant("b", weight=0.5)]}, "turn 1: weight must be 0 or 1"),
        ({"messages": [user("a"), assistant("b", weight=1, train=False)]}, "turn 1: train and weight contradict"),
        ({"messages": [{**user("a"), "train": True}, assistant("b")]}, "turn 0: only assistant turns can be learned"),
        ({"messages": [user("a")]}, "row 0: no assistant turn is left to learn"),
        ({"messages": [user("a"), assistant("b", train=False)]}, "no assistant turn is left to learn"),
        ({"messages": [user(None), assistant("b")]}, "turn 0: content must be a string"),
        ({"messages": [user([{"type": "image", "text": "x"}]), assistant("b")]}, "turn 0: only text parts"),
        (
            {"messages": [user("a"), call("{broken")]},
            "turn 1: the arguments of tool call 'find_flight' are broken JSON",
        ),
        ({"messages": [user("a"), call("[" * 100_000)]}, "turn 1: the arguments of .* are broken JSON: maximum rec"),
        (
            {"messages": [user("a"), assistant("b", tool_calls=5)]},
            "turn 1: tool_calls must be a list of dicts, got int 5",
        ),
        ({"messages": [user("a"), assistant("b", reasoning_content=[1])]}, "turn 1: reasoning_content must be a str"),
        ({"messages": [user("a"), assistant("b\ud83d c")]}, "turn 1: the text holds half of a character at position 1"),
        ({"text": "b\ud83d c"}, "row 0: the text holds half of a character at position 1"),
        (
            {"messages": [user("a"), call({"to": "\ud83d"})], "tools": TOOLS},
            "row 0: the text holds half of a character",
        ),
        (
            {"messages": [user("a"), {"role": "model", "content": "b"}]},
            "no assistant turn .* roles here: model, u",
        ),
        ({"input_ids": [2**40, 1], "labels": [2**40, 1]}, "none negative or above 2147483647"),
        ({"conversations": [{"from": ["x"], "value": "a"}]}, r"turn 0: unknown speaker list \['x'\]"),
        ({"messages": [user("a"), call([1])]}, "turn 1: the arguments of tool call 'find_flight' must be a dict"),
        ({"messages": [user("a"), {"role": "developer", "content": "x y"}, assistant("b")]}, "turn 1 .* leaves out"),
        ({"messages": [user("a"), assistant("b")], "tools": "[oops"}, "row 0: tools are broken JSON"),
        ({"prompt": "a", "completion": [assistant("b")]}, "both be text or both lists"),
        ({"prompt": "a", "completion": "b", "label": False}, "row 0: label is False, but preferences .KTO. are not"),
        ({"prompt": [user("a")], "completion": [assistant("b")], "label": True}, "row 0: label is True, but pref"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 0: unknown speaker str 'robot'"),
    ],
)
def test_malformed_rows_are_refused_with_row_and_turn(row, problem):
    with pytest.raises(DataError, match=problem):
        tokenize([row])


@pytest.mark.parametrize("columns", [{"question": "a", "answer": "b"}, {"messages": [user("a")], "text": "a"}])
def test_wrong_columns_show_what_was_found_and_what_is_known(columns):
    with pytest.raises(DataError, match=r"columns \[.*\] fit .*Formats: messages: messages; prompt/completion:"):
        tokenize([columns])


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_tokens_with_a_mask_of_trl_are_told_its_name_here(mask):
    with pytest.raises(DataError, match=rf"fit no known format; rename {mask} to loss_mask\. Formats: "):
        tokenize([{"input_ids": [5, 6], mask: [0, 1]}])


def test_a_label_that_is_no_preference_is_a_column_like_any_other():
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "label": "sport"}]
    plain, labelled = (tokenize([row])[0] for row in rows)
    assert np.array_equal(plain["input_ids"], labelled["input_ids"])


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


def test_no_usable_row_is_an_error():
    with pytest.raises(DataError, match="no usable example is left of 6: all were longer than max_length=9"):
        tokenize(load_conversations("mtbench"), max_length=9, overlong="drop")
    with pytest.raises(DataError, match="no rows"):
        tokenize([])


def test_datasets_of_the_wrong_kind_are_refused_by_name():
    stream = IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    with pytest.raises(ConfigError, match="an IterableDataset has no length"):
        prepare_dataset(stream, load_tokenizer())
    with pytest.raises(ConfigError, match=r"list of dicts, got dict.*one split"):
        prepare_dataset({"train": []}, load_tokenizer())


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
        assert without_header_newline(template, texts, messages) == expected


TOKENIZER = load_tokenizer()
TRANSFORMS = {name: ChatTransform(load_tokenizer(name)) for name in ("qwen2_5_training", "smollm2")}
