"""Templates that rewrite, leave out or mark wrongly what a conversation holds are errors that say what to do."""

import pickle
import re

import pytest

from hf_megapack.data import rendering
from hf_megapack.data.chat import ChatTransform
from hf_megapack.errors import ConfigError, DataError
from tests.helpers.assets import load_conversations, load_template, load_tokenizer
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


def test_template_that_rewrites_history_is_refused_for_all_and_points_to_each():
    rows = load_conversations("mtbench")
    with pytest.raises(
        DataError, match=r'turn 1: .* changes earlier text .* use assistant_mask="each", or set tokenizer\.chat'
    ):
        tokenize(rows, load_tokenizer("qwen3"))


def test_template_that_drops_old_reasoning_is_refused_for_learned_turns():
    """The tags are right here, but the old turn would be learned without its reasoning."""
    drops = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer()
    tokenizer.chat_template = drops
    turns = [assistant(f"say {index}", reasoning_content=f"think {index}") for index in (1, 2)]
    row = {"messages": [user("a"), turns[0], user("b"), turns[1]]}
    with pytest.raises(DataError, match=r"turn 1 .assistant.: .* leaves out the reasoning"):
        tokenize([row], tokenizer)
    [example] = tokenize([row], tokenizer, assistant_mask="last")
    assert learned_texts(example, tokenizer) == ["think 2say 2<|im_end|>"]


@pytest.mark.parametrize("data", ["bfcl", "tau"])
@pytest.mark.parametrize("mask", ["all", "last", "each"])
def test_template_without_tools_is_refused(data, mask):
    with pytest.raises(DataError, match=r"row 0: .* leaves out every one of the given tools.*; set tokenizer\.chat_t"):
        tokenize(load_conversations(data), load_tokenizer("smollm2"), assistant_mask=mask)


@pytest.mark.parametrize(
    ("cut", "problem"),
    [
        ("{{- tool_call.name }}", "row 0, turn 1 .assistant.: .* leaves out the name of tool call 'find_flight'"),
        ("{{- tool_call.arguments | tojson }}", "turn 1 .assistant.: .* leaves out the arguments of tool call"),
    ],
)
def test_template_that_omits_part_of_a_tool_call_is_refused(cut, problem):
    tokenizer = load_tokenizer()
    assert cut in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(cut, "")
    with pytest.raises(DataError, match=problem):
        tokenize([{"messages": TOOL_SHAPE, "tools": TOOLS}], tokenizer)


WITHOUT_TOOLS = (
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and m.content) %}<|im_start|>{{ m.role }}"
    "\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNTRAINED_CALL = {**call({}), "train": False}


@pytest.mark.parametrize("mask", ["all", "last", "each"])
@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([user("2+2?"), {"role": "tool", "content": "4"}, assistant("It is 4.")], "turn 1 .tool.: .* the text"),
        ([user("2+2?"), {"role": "tool", "content": ""}, assistant("It is 4.")], "turn 1 .tool.: .* the text"),
        ([{"role": "system", "content": "Be kind"}, user("Be kind!"), assistant("x")], "turn 0 .system.: .* the text"),
        ([user("find_flight {}"), UNTRAINED_CALL, assistant("x")], "turn 1 .assistant.: .* tool call 'find_flight'"),
        ([user("fly"), UNTRAINED_CALL, assistant("x")], "turn 1 .assistant.: .* tool call 'find_flight'"),
    ],
)
def test_a_dropped_turn_is_noticed_though_other_turns_hold_its_text_or_it_is_not_learned(messages, problem, mask):
    tokenizer = load_tokenizer()
    tokenizer.chat_template = WITHOUT_TOOLS
    with pytest.raises(DataError, match=f"row 0, {problem}"):
        tokenize([{"messages": messages}], tokenizer, assistant_mask=mask)


CALLED = call({"seats": 2})


@pytest.mark.parametrize("mask", ["all", "last", "each"])
@pytest.mark.parametrize(
    ("text", "template"),
    [
        ("s", WITHOUT_TOOLS),
        ("user", WITHOUT_TOOLS),
        ("assistant", WITHOUT_TOOLS),
        ("im_start", WITHOUT_TOOLS),
        ("2", "{{ tools }}" + WITHOUT_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")),
        ("Find", "{{ tools }}" + WITHOUT_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")),
    ],
)
def test_a_dropped_turn_is_noticed_though_a_header_a_tool_or_a_call_holds_its_text(text, template, mask):
    tokenizer = load_tokenizer()
    tokenizer.chat_template = template
    asks = {**CALLED, "content": "I look."} if "tools" in template else assistant("I look.")
    messages = [user("Go on?"), asks, {"role": "tool", "content": text}, assistant("Yes.")]
    tools = TOOLS if "tools" in template else None
    with pytest.raises(DataError, match=r"row 0, turn 2 .tool.: .* leaves out the text of this turn"):
        tokenize([{"messages": messages, "tools": tools}], tokenizer, assistant_mask=mask)
    messages[2] = user(text)
    assert tokenize([{"messages": messages, "tools": tools}], tokenizer, assistant_mask=mask)


LONG = "The parcel was sent to Rome on Monday,\nand it will arrive at the station on Friday."
WITH_CALLS = WITHOUT_TOOLS.replace(" and m.content", "").replace(
    "{{ m.content }}",
    "{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}",
)


@pytest.mark.parametrize("mask", ["all", "last", "each"])
@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([user("x"), call({"text": LONG}), {"role": "tool", "content": LONG}, assistant("done")], "turn 2 .tool."),
        (
            [{"role": "system", "content": LONG}, user("x"), assistant("done", reasoning_content=f"So: {LONG}")],
            "turn 0 .system.",
        ),
    ],
)
def test_a_dropped_turn_is_noticed_though_a_call_or_reasoning_repeats_its_long_text(messages, problem, mask):
    tokenizer = load_tokenizer()
    tokenizer.chat_template = WITH_CALLS
    with pytest.raises(DataError, match=f"row 0, {problem}: .* leaves out the text of this turn"):
        tokenize([{"messages": messages}], tokenizer, assistant_mask=mask)
    tokenizer.chat_template = WITH_CALLS.replace("m.role == 'user' or", "m.role != 'assistant' or")
    assert tokenize([{"messages": messages}], tokenizer, assistant_mask=mask)


@pytest.mark.parametrize("thought", ["2+2", LONG.replace("\n", " ")])
@pytest.mark.parametrize("form", ["reasoning_content", "thinking", "inline"])
def test_dropped_reasoning_is_noticed_though_the_answer_repeats_it(thought, form):
    answer = f"{thought} is it."
    turn = assistant(f"<think>{thought}</think>{answer}") if form == "inline" else assistant(answer, **{form: thought})
    row = {"messages": [user("?"), turn]}
    name = "deepseek_v3_1" if form == "inline" else "smollm2"
    with pytest.raises(DataError, match=r"row 0, turn 1 .assistant.: .* leaves out the (reasoning|key 'thinking')"):
        tokenize([row], load_tokenizer(name), assistant_mask="each")
    [example] = tokenize([row], load_tokenizer("qwen3"), assistant_mask="each")
    assert learned_texts(example, load_tokenizer("qwen3")) == [f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"]


@pytest.mark.parametrize("mask", ["all", "last", "each"])
@pytest.mark.parametrize(
    ("tool_call", "key"),
    [
        ({"type": "function", "function": {"name": "find_flight", "parameters": {"n": 1}}}, "parameters"),
        ({"type": "function", "function": {"name": "find_flight"}, "arguments": {"n": 1}}, "arguments"),
        ({"name": "find_flight", "args": {"to": "Rome"}, "id": "x", "type": "tool_call"}, "args"),
        ({"name": "find_flight", "input": {"to": "Rome"}, "id": "x", "type": "tool_use"}, "input"),
        ({"name": "find_flight", "arguments": {"to": "Rome"}, "result": "3 flights"}, "result"),
    ],
)
def test_what_a_tool_call_holds_under_another_name_does_not_vanish(tool_call, key, mask):
    row = {"messages": [user("Fly"), assistant("", tool_calls=[tool_call]), user("So?"), assistant("Yes.")]}
    with pytest.raises(DataError, match=f"turn 1 .assistant.: .* leaves out the key '{key}' of tool call 'find_fl"):
        tokenize([row], load_tokenizer(), assistant_mask=mask)
    tokenizer = load_tokenizer()
    tokenizer.chat_template = WITHOUT_TOOLS.replace(" and m.content", "").replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}"
    )
    assert tokenize([row], tokenizer, assistant_mask=mask)


def test_system_text_that_a_template_drops_is_refused():
    """Mistral's template writes the system text only when the last message is the user's."""
    with pytest.raises(DataError, match="row 0"):
        tokenize([{"messages": PLAIN_SHAPES["system first"]}], load_tokenizer("mistral_nemo"))


def test_template_that_raises_names_row_and_turn():
    row = {"messages": [user("a"), assistant("b"), user("c"), user("d"), assistant("e")]}
    with pytest.raises(DataError, match=r"row 1, turn 3 .user.: .* cannot render .*roles must alternate"):
        tokenize([{"messages": [user("a"), assistant("b")]}, row], load_tokenizer("mistral_nemo"))


@pytest.mark.parametrize("overrun", [(0, 12), (0, 40), (-29, 0), (-33, 0), (-40, 0)])
@pytest.mark.parametrize("mask", ["all", "last", "each"])
def test_library_spans_that_overrun_a_turn_are_caught(monkeypatch, overrun, mask):
    """The library has returned such spans; a learned token of another turn must never come of it."""
    original = rendering.render_jinja_template

    def stretched(**arguments):
        texts, spans = original(**arguments)
        before, after = overrun
        return texts, [[(max(start + before, 0), end + after) for start, end in spans[0][:1]] + spans[0][1:]]

    transform = ChatTransform(load_tokenizer(), assistant_mask=mask)
    monkeypatch.setattr(rendering, "render_jinja_template", stretched)
    messages = [user("Hi"), assistant("Hello."), user("Yes?"), assistant("No.")]
    with pytest.raises(DataError, match=r"row 0.*(outside|nothing of)"):
        list(transform.tokenize([{"messages": messages}], [0], format_name="messages"))
    with pytest.raises(ConfigError, match="reach outside assistant turns"):
        ChatTransform(load_tokenizer())


def test_tags_around_a_user_turn_are_refused_at_once():
    tagged_user = (
        "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="reach outside assistant turns"):
        ChatTransform(load_tokenizer(), chat_template=tagged_user)


HEADER = "<|im_start|>{{ m.role }}\n"
TURN = HEADER + (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "where"),
    [
        ("{% macro say(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}", "a macro"),
        ("{% for m in messages %}{% set t %}" + TURN + "{% endset %}{{ t }}{% endfor %}", "a {% set %} block"),
        ("{% for m in messages %}{% filter trim %}" + TURN + "{% endfilter %}{% endfor %}", "a {% filter %} block"),
        ("{% for m in messages recursive %}" + TURN + "{% endfor %}", "a recursive loop"),
        ("{% for m in messages %}{% generation %}" + TURN + "{% endgeneration %}{% endfor %}", "a {% call %} block"),
    ],
)
def test_tags_in_text_that_is_put_together_first_are_refused(template, where):
    """There the library's spans begin with the header and end before the answer does."""
    with pytest.raises(ConfigError, match=f"generation tags .* stand inside {re.escape(where)}.* .line 1."):
        ChatTransform(load_tokenizer(), chat_template=template)


def test_turns_without_a_learned_end_token_are_said_once(caplog):
    tagged = load_template("llama3_training").replace(
        "{{- message['content'] | trim + '<|eot_id|>' }}\n        {%- endgeneration %}",
        "{{- message['content'] | trim }}\n        {%- endgeneration %}{{- '<|eot_id|>' }}",
    )
    assert tagged != load_template("llama3_training")
    untagged = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for text in (tagged, untagged):
        caplog.clear()
        transform = ChatTransform(load_tokenizer("llama3_training"), chat_template=text)
        pickle.loads(pickle.dumps(transform))
        assert sum("may not learn to stop" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    for name in TEMPLATES:
        ChatTransform(load_tokenizer(name))
    assert not caplog.records


def test_every_token_learned_is_an_error_when_there_are_other_turns():
    bare = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    bare += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = load_tokenizer()
    tokenizer.chat_template = bare
    with pytest.raises(DataError, match="row 0: every token would be learned"):
        tokenize([{"messages": [user(""), assistant("Hello there.")]}], tokenizer)
