"""The forms that rows of a dataset may have, and what is said of rows and datasets that have none of them."""

import json

import numpy as np
import pytest
from datasets import IterableDataset

from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.formats import read_row
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.errors import ConfigError, DataError
from tests.helpers.assets import load_conversations, load_tokenizer
from tests.helpers.chats import TOOLS, assistant, call, learned_texts, tokenize, user


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
        ({"input_ids": [5, 6], "labels": [-100, 6], "position_ids": [0, 0]}, "row 0: position_ids says .* packed bef"),
        ({"input_ids": [5, 6], "labels": [-100, 6], "position_ids": [7, 8]}, "position_ids says .* begins elsewhere"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "seq_lengths": [1, 1]}, "row of its own, without seq_lengths"),
        ({"input_ids": [5, 6], "labels": [5, 6], "completion_mask": [1, 0]}, "row 0: completion_mask leaves out toke"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "assistant_masks": [0]}, "row 0: assistant_masks leaves out toke"),
        ({"input_ids": [0.5, 1.0], "loss_mask": [0, 1]}, "flat list of integers"),
        ({"messages": []}, "row 0: messages must be a non-empty list"),
        ({"messages": ["hi"]}, "row 0, turn 0: a message must be a dict"),
        ({"messages": [{"content": "hi"}]}, "turn 0: a message needs a role"),
        (
            {"messages": [{"from": "human", "value": "hi"}]},
            "got NoneType None; from and value are read in",
        ),
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
        (
            {"messages": [user("a"), call('{"q": {"to": "Rome", "to": "Paris"}}')]},
            "turn 1: the arguments of tool call 'find_flight' have the key 'to' more than once",
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


def test_columns_beside_tokens_that_say_the_same_pass():
    row = {"input_ids": [5, 6, 7, 0], "labels": [5, -100, 7, -100], "attention_mask": [1, 1, 1, 0]}
    beside = {
        "position_ids": [0, 1, 2, 1],
        "seq_lengths": [4],
        "completion_mask": [0, 1, 1, 1],
        "assistant_masks": None,
    }
    [plain], [same] = (tokenize([each]) for each in (row, {**row, **beside}))
    assert same["loss_mask"].tolist() == plain["loss_mask"].tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="row 3: position_ids"):
        ChatTransform(load_tokenizer())({**{k: [v] for k, v in row.items()}, "position_ids": [[0, 1, 0, 1]]}, [3])


def test_nulls_of_json_text_are_the_tools_own():
    """A default of null is no filler where no columnar store has touched the tools."""
    tool = {"name": "f", "parameters": {"properties": {"unit": {"default": None}}}}
    tokenizer = load_tokenizer()
    for tools in (json.dumps([tool]), [json.dumps(tool)]):
        [example] = tokenize([{"messages": [user("a"), assistant("b")], "tools": tools}], tokenizer)
        assert '"unit": {"default": null}' in tokenizer.decode(example["input_ids"])
    [example] = tokenize([{"messages": [user("a"), assistant("b")], "tools": [tool]}], tokenizer)
    assert '"unit": {}' in tokenizer.decode(example["input_ids"])


def test_a_label_that_is_no_preference_is_a_column_like_any_other():
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "label": "sport"}]
    plain, labelled = (tokenize([row])[0] for row in rows)
    assert np.array_equal(plain["input_ids"], labelled["input_ids"])


def test_no_usable_row_is_an_error():
    with pytest.raises(DataError, match="no usable example is left of 6: all were longer than max_length=9"):
        tokenize(load_conversations("mtbench"), max_length=9, overlong="drop")
    with pytest.raises(DataError, match="no rows"):
        tokenize([])


def test_datasets_of_the_wrong_kind_are_refused_by_name():
    stream = IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    with pytest.raises(ConfigError, match="an IterableDataset has no length"):
        prepare_dataset(stream, load_tokenizer())
    with pytest.raises(ConfigError, match=r"IterableDataset or a list of dicts, got dict.*one split"):
        prepare_dataset({"train": []}, load_tokenizer())
    with pytest.raises(ConfigError, match=r"got list that holds something else"):
        prepare_dataset(["text"], load_tokenizer())
    with pytest.raises(ConfigError, match=r"got str\. .*read files with datasets\.load_dataset"):
        prepare_dataset("train.jsonl", load_tokenizer())


@pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": None, "tool_calls": [], "name": "bot"}])
def test_an_assistant_turn_without_content_is_refused_but_an_empty_one_is_not(turn):
    """Training would teach the model to answer with nothing."""
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **turn}]}
    with pytest.raises(DataError, match=r"row 4, turn 1: an assistant turn without content; remove it, or write"):
        read_row("messages", row, 4)
    row["messages"][1]["content"] = ""
    assert read_row("messages", row, 4).messages[1]["content"] == ""
