"""What stands beside the text: variables of the template are honoured, and nothing that holds text is left out."""

import pickle

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from hf_megapack.data.beside import COLUMNS, MESSAGE_KEYS
from hf_megapack.data.chat import ChatTransform
from hf_megapack.data.formats import recognise_format
from hf_megapack.data.prepare import prepare_dataset
from hf_megapack.data.stream import ExampleStream
from hf_megapack.errors import DataError
from tests.helpers.assets import load_tokenizer
from tests.helpers.chats import assistant, user

MASKS = ("all", "last", "each")
# A template of the ChatML kind that writes its variables and one more key of a message.
CHATML = (
    "{% if custom_instructions %}<|im_start|>system\n{{ custom_instructions }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}KEY<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CHAT = [user("Hi"), assistant("Hello there."), user("And?"), assistant("Bye.")]


def tokenize(rows, template="qwen2_5", mask="all", text=None):
    """Return the examples of rows, in one format."""
    transform = ChatTransform(load_tokenizer(template), assistant_mask=mask, chat_template=text)
    return list(transform.tokenize(rows, range(len(rows)), format_name=recognise_format(rows[0])))


def learned(example, tokenizer):
    edges = np.flatnonzero(np.diff(np.concatenate(([0], example.loss_mask, [0]))))
    return [tokenizer.decode(example.input_ids[start:end]) for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("template", ["smollm3", "qwen3", "qwen3_hub", "deepseek_v3_1", "nemotron_3_nano_training"])
@pytest.mark.parametrize("thinking", [True, False])
def test_rows_are_rendered_with_their_own_template_kwargs(template, mask, thinking):
    """Equal to transformers given the same; a row without any, between two that have some, stays as it was."""
    tokenizer = load_tokenizer(template)
    name = "thinking" if template.startswith("deepseek") else "enable_thinking"
    messages = CHAT[:2] if template.startswith("qwen3") or mask == "each" else CHAT
    kwargs = {name: thinking, "unset": None}
    rows = [{"messages": messages, "chat_template_kwargs": kwargs}, {"messages": messages}]
    rows += [{"messages": messages, "chat_template_kwargs": {name: not thinking}}, rows[0]]
    examples = tokenize(rows, template, mask)
    for example, given in zip(examples, [{name: thinking}, {}, {name: not thinking}, {name: thinking}], strict=True):
        assert tokenizer.decode(example.input_ids) == tokenizer.apply_chat_template(messages, tokenize=False, **given)
        texts = "".join(learned(example, tokenizer))
        assert messages[-1]["content"] in texts
        if mask == "each":
            prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, **given)
            first = int(np.argmax(example.loss_mask))
            assert tokenizer.decode(example.input_ids[:first]) in (prompt, prompt.removesuffix("<think>\n"))


def test_smollm3_is_told_not_to_think():
    row = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = load_tokenizer("smollm3")
    [example] = tokenize([row], "smollm3")
    assert "Reasoning Mode: /no_think" in tokenizer.decode(example.input_ids)
    # The generation prompt of this mode has closed the thinking block already.
    assert learned(example, tokenizer) == ["Hello there.<|im_end|>", "Bye.<|im_end|>"]
    [told] = tokenize([{**row, "messages": CHAT[1:]}], "smollm3")
    assert learned(told, tokenizer) == ["Hello there.<|im_end|>", "Bye.<|im_end|>"]


@pytest.mark.parametrize("source", ["dataset", "map", "stream", "prompt", "ShareGPT"])
def test_template_kwargs_arrive_from_every_source_and_format(source):
    """The columnar store fills up each row's dict with the keys of the others."""
    tokenizer = load_tokenizer("smollm3")
    settings = [{"enable_thinking": False}, {"custom_instructions": "Be brief."}, None]
    rows = [{"messages": CHAT, "chat_template_kwargs": each} for each in settings]
    want = [tokenizer.apply_chat_template(CHAT, tokenize=False, **(each or {})) for each in settings]
    transform = ChatTransform(tokenizer, assistant_mask="last")
    if source == "dataset":
        ids = prepare_dataset(Dataset.from_list(rows), tokenizer, assistant_mask="last")["input_ids"]
    elif source == "map":
        batch = {name: [row[name] for row in rows] for name in rows[0]}
        ids = pickle.loads(pickle.dumps(transform))(batch, range(3))["input_ids"]
    elif source == "stream":
        stream = ExampleStream(IterableDataset.from_generator(lambda: iter(rows)), transform)
        ids = [example.input_ids for example in stream.examples(0, 2)]
    else:
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
        texts = {"prompt": CHAT[:3], "completion": CHAT[3:]} if source == "prompt" else {"conversations": turns}
        ids = [e.input_ids for e in tokenize([{**texts, "chat_template_kwargs": each} for each in settings], "smollm3")]
    assert [tokenizer.decode(each) for each in ids] == want


def test_many_settings_are_not_mixed_up():
    """More than are kept."""
    tokenizer = load_tokenizer("smollm3")
    texts = [f"Rule {n % 70}." for n in range(150)]
    rows = [{"messages": CHAT, "chat_template_kwargs": {"custom_instructions": text}} for text in texts]
    for example, text in zip(tokenize(rows, "smollm3"), texts, strict=True):
        assert f"{text}\n\n<|im_end|>" in tokenizer.decode(example.input_ids)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ('{"enable_thinking": false}', r"row 0: chat_template_kwargs must be a dict .* got str '\{\"enable_th"),
        ([1], r"chat_template_kwargs must be a dict of variables for the template, .* got list '\[1\]'"),
        ({"messages": [user("x")]}, r"row 0: chat_template_kwargs may not hold messages \(the column messages says"),
        ({"tools": [{}]}, r"may not hold tools \(the column tools says that\); remove it"),
        ({"add_generation_prompt": False}, r"may not hold add_generation_prompt \(it depends on the turn"),
        ({"tokenize": True}, r"may not hold tokenize \(it is no variable"),
        ({"chat_template": "x"}, r"may not hold chat_template \(one template"),
        ({"enable_thinking": True}, "row 0: chat_template_kwargs has enable_thinking, which .* does not read"),
    ],
)
def test_wrong_template_kwargs_are_refused(value, problem):
    with pytest.raises(DataError, match=problem):
        tokenize([{"messages": CHAT, "chat_template_kwargs": value}])


def test_template_kwargs_that_say_nothing_pass_and_text_pairs_take_none():
    for value in (None, {}, {"enable_thinking": None}, {"enable_thinking": False}, {"xml_tools": []}):
        [example] = tokenize([{"messages": CHAT, "chat_template_kwargs": value}])
        assert example.input_ids.tolist() == tokenize([{"messages": CHAT}])[0].input_ids.tolist()
    pair = {"prompt": "a", "completion": "b"}
    assert tokenize([{**pair, "chat_template_kwargs": {"a": None}}])
    with pytest.raises(DataError, match="row 0: chat_template_kwargs need prompt and completion to be lists"):
        tokenize([{**pair, "chat_template_kwargs": {"a": 1}}])


CALL = {"name": "find", "arguments": '{"n": 2}'}
VALUES = {
    "function_call": CALL,
    "function_calls": "find(n=2)",
    "tool_call": [{"function": CALL}],
    "parts": [{"text": "Hello"}],
    "tools": [{"name": "find"}],
    "functions": '[{"name": "find"}]',
    "images": [{"path": "a.png"}],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("key", MESSAGE_KEYS)
def test_keys_that_hold_text_are_refused_where_the_template_leaves_them_out(key, mask):
    value = VALUES.get(key, "Only here.")
    rows = [{"messages": [user("Hi"), assistant(None, **{key: value})]}]
    with pytest.raises(DataError, match=rf"row 0, turn 1 .assistant.: .* leaves out the key '{key}' of this turn \("):
        tokenize(rows, "smollm2", mask)
    for nothing in (None, "", " ", [], {}, {"name": None}, [None], False, True, 3):
        assert tokenize([{"messages": [user("Hi"), assistant("Hello.", **{key: nothing})]}], "smollm2", mask)
    write = ".name" if isinstance(value, dict) else ""
    text = CHATML.replace("KEY", f"{{% if m.{key} %}}{{{{ m.{key}{write} }}}}{{% endif %}}")
    [example] = tokenize(rows, mask=mask, text=text)
    shown = value["name"] if isinstance(value, dict) else str(value)
    assert learned(example, load_tokenizer()) == [f"{shown}<|im_end|>"]


def test_keys_of_user_turns_are_read_too_and_reasoning_matters_in_learned_turns():
    with pytest.raises(DataError, match=r"row 0, turn 0 .user.: .* leaves out the key 'images' of this turn"):
        tokenize([{"messages": [user("What is this?", images=["a.png"]), assistant("A cat.")]}])
    with pytest.raises(DataError, match=r"row 0, turn 0 .user.: .* leaves out the key 'value' of this turn"):
        tokenize([{"messages": [user("What is this?", value="A cat."), assistant("A cat.")]}])
    assert tokenize([{"messages": [user("What is this?", value="What is this?"), assistant("A cat.")]}])
    row = {"messages": [user("Hi"), assistant("Hello.", reasoning="Greet.", train=False), user("x"), assistant("y")]}
    [example] = tokenize([row])
    assert "Greet." not in load_tokenizer().decode(example.input_ids)
    with pytest.raises(DataError, match=r"the key 'reasoning' of this turn \(templates look for reasoning_content\)"):
        tokenize([{"messages": [user("Hi"), assistant("Hello.", reasoning="Greet.")]}])


def test_keys_that_keep_books_and_texts_that_are_there_anyway_pass():
    books = {
        "id": "m1",
        "timestamp": "2024",
        "metadata": {"model": "x"},
        "name": "Ann",
        "tool_call_id": "c",
        "score": 1,
    }
    [plain], [other] = (
        tokenize([{"messages": [user("Hi"), assistant("Hello.", **keys)]}])
        for keys in ({}, {**books, "text": "Hello."})
    )
    assert plain.input_ids.tolist() == other.input_ids.tolist()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["thinking", "reasoning"])
def test_reasoning_under_another_name_is_learned_where_it_is_rendered(mask, name):
    """Transformers gives it to templates as reasoning_content."""
    tokenizer = load_tokenizer("qwen3_hub")
    messages = [user("Hi"), assistant("Hello.", **{name: "Greet."})]
    [example] = tokenize([{"messages": messages}], "qwen3_hub", mask)
    assert learned(example, tokenizer) == ["<think>\nGreet.\n</think>\n\nHello.<|im_end|>"]
    # Where a turn that opens the conversation begins is told by the marks in the template's loops.
    text = CHATML.replace("{{ m.content }}KEY", "{{ m.reasoning_content }}|{{ m.content }}")
    [opening] = tokenize([{"messages": messages[1:]}], mask=mask, text=text)
    assert learned(opening, tokenizer) == ["Greet.|Hello.<|im_end|>"]


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_that_hold_what_no_message_does_are_refused(column):
    value = ["a.png"] if column in ("images", "videos", "audios", "history") else "Talk like a pirate."
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    problem = f"row 0: the column {column} is not read and holds what no message does, .*remove the column"
    formats = [{"messages": CHAT}, {"conversations": turns}, {"prompt": CHAT[:1], "completion": CHAT[1:2]}]
    for texts in (*formats, {"prompt": "a", "completion": "b"}, {"text": "Once upon a time"}):
        with pytest.raises(DataError, match=problem):
            tokenize([{**texts, column: value}])
        for nothing in (None, "", " \n", [], [None], [["", ""]], 0, False):
            assert tokenize([{**texts, column: nothing}])
    transform = ChatTransform(load_tokenizer())
    with pytest.raises(DataError, match=problem):
        transform({"messages": [CHAT], column: [value]}, [0])
    with pytest.raises(DataError, match=problem):
        prepare_dataset(Dataset.from_list([{"messages": CHAT, column: value}]), load_tokenizer())


def test_columns_that_repeat_a_message_and_unknown_ones_pass():
    row = {"messages": [{"role": "system", "content": "Be brief."}, *CHAT], "system": "Be brief. ", "instruction": "Hi"}
    assert tokenize([{**row, "source": "web", "reward": 1.0, "answer": "Bye"}])
    with pytest.raises(DataError, match=r'column system .* as its first message, with role "system"'):
        tokenize([{**row, "system": "Be long."}])


@pytest.mark.parametrize(
    ("role", "likely"),
    [
        ("Assistant", "assistant"),
        (" assistant", "assistant"),
        ("USER", "user"),
        ("gpt", "assistant"),
        ("human", "user"),
    ],
)
def test_slips_of_roles_are_refused_with_the_likely_role(role, likely):
    messages = [*CHAT, user("And now?"), {"role": role, "content": "SECRET"}]
    with pytest.raises(DataError, match=f"row 0, turn 5: unknown role '{role}'; known are .* Write '{likely}' in"):
        tokenize([{"messages": messages}], text=CHATML.replace("KEY", ""))
    with pytest.raises(DataError, match=f"unknown role '{role}'"):
        tokenize([{"conversations": messages}])


def test_other_roles_stay_as_the_template_renders_them():
    messages = [{"role": "observation", "content": "Rain."}, {"role": "developer", "content": "Be brief."}, *CHAT]
    [example] = tokenize([{"messages": messages}], text=CHATML.replace("KEY", ""))
    assert "<|im_start|>observation\nRain.<|im_end|>" in load_tokenizer().decode(example.input_ids)


def test_the_hint_at_each_stands_where_it_helps():
    turns = [assistant(f"say {index}", reasoning_content=f"think {index}") for index in (1, 2)]
    row = {"messages": [user("a"), turns[0], user("b"), turns[1]]}
    # The reasoning of the last turn alone, as most templates have it, with tags.
    last = "{% generation %}{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endgeneration %}"
    text = CHATML.replace(
        "{{ m.content }}KEY", f"{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% else %}}{last}{{% endif %}}"
    )
    with pytest.raises(
        DataError, match=r'turn 1 .*leaves out the reasoning of this turn \(try assistant_mask="each", wh'
    ):
        tokenize([row], text=text)
    assert len(tokenize([row], text=text, mask="each")) == 2
    never = text.replace("loop.last", "false")
    for mask in MASKS:
        for template in ({"template": "qwen2_5"}, {"text": never}):
            with pytest.raises(DataError, match=r"leaves out the reasoning of this turn, so"):
                tokenize([row], mask=mask, **template)
