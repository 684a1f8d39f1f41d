"""Formats of tool calls: what is written is read back, what is not a call is never read as one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from chat_templates import IDS_FOR_NAMES, with_template
from hypothesis import given, settings
from hypothesis import strategies as st
from repetition import repeated

from composer_mesh.rollouts.call_formats.choosing import HARMONY, HERMES, KNOWN, calling
from composer_mesh.rollouts.call_formats.port import CallFormat, Schemas
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ParsedAction,
    ToolCall,
    assistant_message,
    call_text,
    message_text,
    parse_calls,
)
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.toolbox import ToolboxTask

TEXT = st.text(st.sampled_from("abcdefgh ÄßжX0123456789.,;:!?'\"()[]{}\n\\/_-+*=#"), max_size=12)
WORDS = ("if", "import", "from", "in", "lambda", "print", "class")  # Python's own, but one
NAME = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True) | st.sampled_from(WORDS)
SCALAR = TEXT | st.integers(-(10**9), 10**9) | st.booleans() | st.none() | st.floats(-1e6, 1e6)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=4,
)
CALLS = st.lists(
    st.builds(ToolCall, NAME, st.dictionaries(NAME, VALUE, max_size=3)), min_size=1, max_size=3
)


def kind_of(value: Any) -> dict[str, str]:
    return {"type": "string"} if isinstance(value, str) else {"type": "object"}


def schemas_of(calls: tuple[ToolCall, ...]) -> Schemas:
    """Tools whose parameters have the types of these calls."""
    return {
        one.name: {"properties": {key: kind_of(value) for key, value in one.arguments.items()}}
        for one in calls
    }


def name_of(one: CallFormat) -> str:
    return f"{one.name}{KNOWN.index(one)}"


@pytest.mark.parametrize("form", repeated(KNOWN, 6), ids=name_of)
@settings(max_examples=20)
@given(calls=CALLS, before=st.sampled_from(["", "I look.\n", "<think>\nhm, [x] {y}\n</think>\n\n"]))
def test_what_is_written_is_read_back(form: CallFormat, calls: list[ToolCall], before: str) -> None:
    made = tuple({one.name: one for one in calls}.values())
    if form == HARMONY:
        made = made[:1]
    if form.name in ("llama_json", "llama_pythonic") and "I look" in before:
        before = ""  # their calls are the whole answer
    found = form.read(form.write(ParsedAction(before, made)), schemas_of(made))
    assert isinstance(found, ParsedAction)
    assert found.calls == made
    assert found.text.replace("<think>", "").strip() == before.replace("<think>", "").strip()


@pytest.mark.parametrize("form", repeated(KNOWN, 6), ids=name_of)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**9), calls=CALLS)
def test_a_damaged_call_is_read_or_malformed_and_never_a_traceback(
    form: CallFormat, seed: int, calls: list[ToolCall]
) -> None:
    rng = random.Random(seed)
    text = list(form.write(ParsedAction("", tuple(calls))))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        if rng.random() < 0.5:
            del text[at : at + rng.randint(1, 20)]
        else:
            text[at:at] = rng.choice(
                ["<", "}", '"', "\\", "]", "\ud800", "</", "[[", "\n", "1e999"]
            )
    found = form.read("".join(text), {})
    assert isinstance(found, ParsedAction | MalformedCall)
    if isinstance(found, ParsedAction):
        for one in found.calls:
            assert one.name
            assert isinstance(one.arguments, dict)


@pytest.mark.parametrize("form", [one for one in KNOWN if one != HARMONY], ids=name_of)
def test_text_behind_a_call_and_an_unclosed_call_are_malformed(form: CallFormat) -> None:
    call = ToolCall("look", {"key": "x"})
    text = form.write(ParsedAction("", (call,)))
    for broken in (f"{text} and more", text[: len(text) * 2 // 3]):
        found = form.read(broken, schemas_of((call,)))
        assert isinstance(found, MalformedCall), broken
        assert found.reason
        assert found.text == broken


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen_xml",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ),
        ("gemma", "<|tool_call>call:f{a:1,a:2}<tool_call|>"),
        ("llama_pythonic", "[f(**{'a': 1})]"),
        ("llama_pythonic", "[f(1)]"),
        ("llama_pythonic", "[f(a=g())]"),
        ("llama_pythonic", "[f(a=1), 2]"),
        ("llama_pythonic", "[f(a=" + "[" * 5_000 + "]" * 5_000 + ")]"),
        ("llama_json", '<|python_tag|>print("x")'),
        ("llama_json", '{"name": "f", "parameters": "x"}'),
        ("llama_json", '{"name": "f", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]'),
        ("mistral_args", "[TOOL_CALLS]f{}"),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]"),
    ],
)
def test_calls_that_name_no_tool_or_no_plain_arguments_are_malformed(name: str, text: str) -> None:
    found = [one.read(text, {}) for one in KNOWN if one.name == name]
    assert isinstance(found[0], MalformedCall)


def test_the_orders_of_harmony_headers_are_read_alike() -> None:
    body = '<|message|>{"a": 1}'
    for head in (
        " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
    ):
        text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{head}{body}"
        found = HARMONY.read(text, {})
        assert found == ParsedAction("<think>hm</think>", (ToolCall("f", {"a": 1}),))


def test_texts_stay_texts_where_the_schema_says_so() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=zip>\n75001\n</parameter>\n<parameter=count>\n3\n"
        "</parameter>\n<parameter=note>\n\nline\n\n</parameter>\n</function>\n</tool_call>"
    )
    schemas = {"f": {"properties": {"zip": {"type": "string"}, "count": {"type": "integer"}}}}
    (form,) = [one for one in KNOWN if one.name == "qwen_xml"]
    found = form.read(text, schemas)
    assert isinstance(found, ParsedAction)
    assert found.calls == (ToolCall("f", {"zip": "75001", "count": 3, "note": "\nline\n"}),)


LOOK, PUT = ToolCall("look", {"key": "x"}), ToolCall("put", {"a": 1, "b": 2})
FORMS = pytest.mark.parametrize("form", KNOWN, ids=name_of)


@FORMS
@pytest.mark.parametrize(
    "value",
    [
        *("<tool_call>", "</tool_call>", "a <tool_call>{}</tool_call> b", "</think>", "<think>"),
        *("True", "None", "5", "null", '"5"', "[1]", ""),
    ],
)
def test_a_text_is_read_back_whatever_it_holds(form: CallFormat, value: str) -> None:
    call = ToolCall("note", {"text": value})
    found = form.read(form.write(ParsedAction("", (call,))), schemas_of((call,)))
    assert isinstance(found, ParsedAction)
    assert found.calls == (call,)
    text = HERMES.write(found)  # as every part of a run reads it
    assert parse_calls(text) == (call,)
    assert parse_calls(message_text(assistant_message(text, "call_0"))) == (call,)


WHOLE = ("llama_json", "llama_pythonic")
"""Formats whose calls are the whole answer."""


@FORMS
@pytest.mark.parametrize("calls", [(), (PUT,)])
def test_a_call_that_is_only_thought_of_is_none(
    form: CallFormat, calls: tuple[ToolCall, ...]
) -> None:
    thought = f"Is it {form.write(ParsedAction('', (LOOK,)))} or <tool_call>? No."
    said = "" if calls and form.name in WHOLE else "No."
    text = form.write(ParsedAction(f"<think>{thought}</think>\n\n{said}", calls))
    for one in (text, text.removeprefix("<think>")):  # the prompt may have opened it
        found = form.read(one, schemas_of((LOOK, PUT)))
        assert isinstance(found, ParsedAction), one
        assert found.calls == calls
        assert parse_calls(HERMES.write(found)) == calls


@pytest.mark.parametrize(
    "form", [one for one in KNOWN if one != HARMONY and one.name not in WHOLE], ids=name_of
)
def test_a_call_in_thinking_that_is_not_closed_is_malformed(form: CallFormat) -> None:
    opening = getattr(form, "channel", ("", ""))[0] or "<think>"
    text = f"{opening}I try {form.write(ParsedAction('', (LOOK,)))}"
    assert isinstance(form.read(text, schemas_of((LOOK,))), MalformedCall)


REPEATED = {"qwen_xml": ("=b>", "=a>"), "glm": ("<arg_key>b", "<arg_key>a"), "gemma": ("b:", "a:")}
REPEATED |= {"lfm2": ("b=", "a="), "llama_pythonic": ("b=", "a=")}


@FORMS
def test_an_argument_that_is_given_twice_is_malformed(form: CallFormat) -> None:
    old, new = REPEATED.get(form.name, ('"b"', '"a"'))
    text = form.write(ParsedAction("", (PUT,)))
    assert text.count(old) == 1
    assert isinstance(form.read(text.replace(old, new), schemas_of((PUT,))), MalformedCall)


@FORMS
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_in_no_call(form: CallFormat, number: float) -> None:
    call = ToolCall("put", {"a": number})
    found = form.read(form.write(ParsedAction("", (call,))), schemas_of((call,)))
    # where values have no types it is a text, which no argument of numbers takes
    given = [one.arguments["a"] for one in getattr(found, "calls", ())]
    assert not given or isinstance(given[0], str)


KINDS: dict[str, Any] = {
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "zip": {"type": "string"},
    "size": {"$ref": "#/$defs/Size"},
    "sized": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
    "mixed": {"enum": ["1", 2]},
    "any": {},
    "table": {"type": "object"},
}
SCHEMAS: Schemas = {
    "f": {"properties": KINDS, "$defs": {"Size": {"type": "string", "enum": ["1", "2"]}}}
}


@pytest.mark.parametrize("name", ["qwen_xml", "glm"])
@pytest.mark.parametrize(
    ("argument", "written", "value"),
    [
        ("flag", "True", True),
        ("flag", "false", False),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "5", 5),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("note", "None", None),
        ("note", "5", "5"),
        ("note", "[1]", "[1]"),
        ("zip", "75001", "75001"),
        ("zip", "None", "None"),
        ("size", "1", "1"),
        ("sized", "1", "1"),
        ("sized", "None", None),
        ("mixed", "1", "1"),
        ("mixed", "2", 2),
        ("any", "True", True),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("table", '{"a": [null]}', {"a": [None]}),
        ("flag", "maybe", "maybe"),
        ("unknown", "[1, true]", [1, True]),
    ],
)
def test_a_value_without_quotes_is_what_its_schema_takes(
    name: str, argument: str, written: str, value: Any
) -> None:
    form = next(one for one in KNOWN if one.name == name)
    text = form.write(ParsedAction("", (ToolCall("f", {argument: written}),)))
    found = form.read(text, SCHEMAS)
    assert isinstance(found, ParsedAction)
    assert [(one, type(one)) for one in found.calls[0].arguments.values()] == [(value, type(value))]


@pytest.mark.parametrize("form", [one for one in KNOWN if one.name == "gemma"], ids=name_of)
@pytest.mark.parametrize("key", ["", "a b", " a", "a:b", "{", "a,b", "<|", "é", "a\nb"])
def test_gemmas_writer_leaves_no_key_that_its_reader_refuses(form: CallFormat, key: str) -> None:
    call = ToolCall("f", {key: {key: None}, "other": True})
    found = form.read(form.write(ParsedAction("", (call,))), {})
    assert isinstance(found, ParsedAction)
    assert found.calls == (call,)


def test_a_bare_none_of_gemma_is_null() -> None:
    form = next(one for one in KNOWN if one.name == "gemma")
    found = form.read("<|tool_call>call:book{note:None,window:true}<tool_call|>", {})
    assert isinstance(found, ParsedAction)
    assert found.calls == (ToolCall("book", {"note": None, "window": True}),)


def test_text_behind_a_harmony_call_is_malformed() -> None:
    text = HARMONY.write(ParsedAction("", (LOOK,)))
    behind = f"{text}<|end|><|start|>assistant<|channel|>final<|message|>and more"
    assert isinstance(HARMONY.read(behind, {}), MalformedCall)


def test_a_template_that_writes_ids_for_names_is_kimis_and_gets_ids_that_hold_names(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    chat = ChatFormat(with_template(tokenizer, IDS_FOR_NAMES), toolbox.tools)
    check_chat(chat, hints=True)
    assert chat.style.format.name == "kimi"
    asked: Message = {"role": "user", "content": "q"}
    calls = [ToolCall("lookup", {"key": "x"}, "abc"), ToolCall("calculator", {"a": 1}, "def")]
    results: list[Message] = [
        {"role": "tool", "content": "4", "tool_call_id": one.id} for one in reversed(calls)
    ]
    text = chat.raw_text(chat.first_prompt([asked, calling(*calls), *results, asked]))
    for named in ("functions.lookup:0", "functions.calculator:1"):
        assert f"<|tool_call_begin|>{named}<|tool_call_argument_begin|>" in text
    ends = "<|im_end|>\n<|im_start|>tool\nResult of "
    assert f"{ends}functions.calculator:1\n4{ends}functions.lookup:0\n4<|im_end|>" in text


def test_ids_that_kimi_has_written_are_kept(tokenizer: Any, toolbox: ToolboxTask) -> None:
    chat = ChatFormat(with_template(tokenizer, IDS_FOR_NAMES), toolbox.tools)
    written = chat.raw_text(chat.action(call_text("lookup", {"key": "x"})))
    action = chat.tokenizer.encode(written.replace(":0", ":7"), add_special_tokens=False)
    assert parse_calls(chat.action_text(action)) == (ToolCall("lookup", {"key": "x"}),)
    after = chat.raw_text(chat.continuation([{"role": "tool", "content": "4"}], action))
    assert "Result of functions.lookup:7\n4" in after
