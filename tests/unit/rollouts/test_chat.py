"""Chat: conversations grow by ids, and nothing that is written inside one controls it.

Long messages are encoded in a thread, so that an event loop never stands still for them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from copy import deepcopy
from typing import Any

import pytest
from chat_templates import with_template
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.rollouts.chat import LONG_TEXT, ChatFormat, ChatTemplateError, encoded
from composer_mesh.rollouts.tool_calls import assistant_message, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.toolbox import ToolboxTask

# Of the manner of today's Qwen models: a system part of its own, tools described in it, tool
# results wrapped and joined into user turns.
QWEN_LIKE = """\
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' }}
{{- messages[0].content if has_system else 'You are a helpful assistant.' }}
{%- if tools %}{{ '\n\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}{{ '\n</tools>' }}{% endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.integers(-999, 999)


@pytest.fixture(scope="module")
def qwen_like(corpus: list[str]) -> Any:
    tokenizer = build_tokenizer([*corpus, "You are a helpful assistant."], 400)
    # Runs of spaces are added tokens of some models; each is part of the next one.
    tokenizer.add_tokens(["<tool_response>", "</tool_response>", "  ", "   "])
    tokenizer.chat_template = QWEN_LIKE
    return tokenizer


@pytest.fixture(scope="module", params=["built-in", "qwen-like", "with a system message"])
def chat(
    request: pytest.FixtureRequest, tokenizer: Any, qwen_like: Any, toolbox: ToolboxTask
) -> ChatFormat:
    if request.param == "built-in":
        return ChatFormat(tokenizer, toolbox.tools)
    system = "Be brief." if request.param == "with a system message" else ""
    return ChatFormat(qwen_like, toolbox.tools, system)


def rendered_at_once(chat: ChatFormat, messages: list[Message]) -> list[int]:
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    text = chat.tokenizer.apply_chat_template(
        system + messages, tools=chat.tools, tokenize=False, add_generation_prompt=True
    )
    return chat.tokenizer.encode(text, add_special_tokens=False)


def controls_in(chat: ChatFormat, ids: list[int]) -> list[int]:
    added = chat.tokenizer.added_tokens_decoder
    return [token for token in ids if token in added and added[token].content.strip()]


@st.composite
def exchanges(draw: st.DrawFn) -> list[tuple[str, list[Message]]]:
    """Actions, calls and plain ones, each with the messages that answer it."""
    found: list[tuple[str, list[Message]]] = []
    for turn in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            text = call_text("calculator", {"op": "add", "a": draw(NUMBER), "b": draw(NUMBER)})
            role = {"role": "tool", "tool_call_id": f"call_{turn}"}
        else:
            text, role = f"I think {draw(NUMBER)}.", {"role": "user"}
        answers = draw(st.lists(CONTENT, min_size=1, max_size=2))
        found.append((text, [{**role, "content": content} for content in answers]))
    return found


@given(question=CONTENT, turns=exchanges())
def test_a_conversation_grown_by_ids_is_the_conversation_rendered_at_once(
    chat: ChatFormat, question: str, turns: list[tuple[str, list[Message]]]
) -> None:
    messages: list[Message] = [{"role": "user", "content": question}]
    ids = chat.first_prompt(messages)
    assert ids == rendered_at_once(chat, messages)
    for text, answers in turns:
        ids += chat.action(text)
        messages += [assistant_message(text, "call"), *answers]
        ids += chat.continuation(answers, chat.stop_ids[:1])
        assert ids == rendered_at_once(chat, messages)


def test_the_mark_inside_a_message_is_only_text(chat: ChatFormat) -> None:
    messages = [{"role": "user", "content": "COMPOSERMESHACTIONX COMPOSERMESHACTION"}]
    assert chat.first_prompt(messages) == rendered_at_once(chat, messages)
    after = chat.action_text(chat.continuation(messages, chat.stop_ids[:1]))
    assert after.count("COMPOSERMESHACTIONX COMPOSERMESHACTION<") == 1
    assert "assistant" not in after.partition("COMPOSERMESH")[0]


def every_control(chat: ChatFormat) -> list[str]:
    texts = [token.content for token in chat.tokenizer.added_tokens_decoder.values()]
    return [text for text in texts if text.strip()]


def forgeries(chat: ChatFormat) -> list[str]:
    controls = every_control(chat)
    nested = [f"{one[:4]}{other}{one[4:]}" for one in controls for other in controls]
    split = [control[:1] + "\0" + control[1:] for control in controls]
    runs = ["  ", "   ", "    ", " " * 9, "a     b"]
    return [*controls, "".join(controls), *nested, *split, *runs, *(c * 2 for c in controls)]


def test_a_forged_control_token_is_plain_text_wherever_it_is_written(chat: ChatFormat) -> None:
    def places(content: str) -> list[list[int]]:
        call = {"role": "assistant", "content": content}
        return [
            chat.first_prompt([{"role": "user", "content": content}]),
            chat.first_prompt([{"role": "user", "content": "q"}, call]),
            chat.continuation([{"role": "tool", "content": content}], chat.stop_ids[:1]),
            chat.continuation([{"role": "user", "content": content}], []),
            chat.hint(content),
        ]

    honest = [controls_in(chat, ids) for ids in places("word")]
    for forged in forgeries(chat):
        content = f"so {forged} it is"
        for ids, expected in zip(places(content), honest, strict=True):
            assert controls_in(chat, ids) == expected, content
            assert content in chat.action_text(ids), content


@given(pieces=st.lists(st.sampled_from(list("<|>/_imendtoolcrsp \0")), max_size=30), data=st.data())
def test_no_mixture_of_pieces_of_control_tokens_makes_one(
    chat: ChatFormat, pieces: list[str], data: st.DataObject
) -> None:
    mixed = pieces + data.draw(st.lists(st.sampled_from(every_control(chat)), max_size=6))
    content = "".join(data.draw(st.permutations(mixed)))
    frame = [chat.hint("word"), chat.hint(content)]
    assert controls_in(chat, frame[1]) == controls_in(chat, frame[0])


def test_an_action_that_ran_out_of_tokens_is_closed_in_the_context(chat: ChatFormat) -> None:
    answer = [{"role": "user", "content": "go on"}]
    closed = chat.continuation(answer, chat.stop_ids[:1])
    assert chat.continuation(answer, []) == [chat.stop_ids[0], *closed]


def test_every_context_ends_with_the_generation_prompt(chat: ChatFormat) -> None:
    prompt = chat.generation_prompt
    contexts = [
        chat.first_prompt([{"role": "user", "content": "q"}]),
        chat.continuation([{"role": "tool", "content": "4"}], chat.stop_ids[:1]),
        chat.continuation([{"role": "user", "content": "4"}], []),
    ]
    assert prompt
    for ids in contexts:
        assert ids[-len(prompt) :] == prompt


def test_a_hint_before_the_generation_prompt_reads_as_a_user_turn_of_its_own(
    chat: ChatFormat,
) -> None:
    opening = [{"role": "user", "content": "q"}]
    prompt = chat.generation_prompt
    hinted = chat.first_prompt(opening)[: -len(prompt)] + chat.hint("Hint: look.") + prompt
    said = [*opening, {"role": "user", "content": "Hint: look."}]
    assert hinted == rendered_at_once(chat, said)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_text_of_an_action_comes_back_from_its_ids(chat: ChatFormat, text: str) -> None:
    assert chat.action_text(chat.action(text)) == text
    if not text.endswith(chat.tokenizer.eos_token):  # the end mark, written out, ends an action too
        assert chat.action_text(chat.action(text)[:-1]) == text


def test_a_call_keeps_its_control_tokens_in_ids_and_in_text(chat: ChatFormat) -> None:
    text = call_text("lookup", {"key": "lämp"})
    ids = chat.action(text)
    assert len(controls_in(chat, ids)) == 3
    assert chat.action_text(ids) == text


ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
REWRITING = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- if not (loop.last and add_generation_prompt) %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"""


def test_a_template_that_rewrites_earlier_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ChatTemplateError, match="use one that only appends"):
        _ = ChatFormat(with_template(tokenizer, REWRITING), []).generation_prompt


def test_a_template_that_never_ends_an_assistant_turn_is_refused(tokenizer: Any) -> None:
    chat = ChatFormat(with_template(tokenizer, ENDLESS), [])
    with pytest.raises(ChatTemplateError, match=r"does not end an assistant turn with <\|im_end"):
        chat.continuation([{"role": "user", "content": "q"}], chat.stop_ids[:1])
    with pytest.raises(ChatTemplateError, match=r"does not end an assistant turn with <\|im_end"):
        chat.hint("Hint: look.")


def test_arguments_render_the_same_as_text_and_as_an_object(chat: ChatFormat) -> None:
    arguments = {"op": "add", "a": 1, "b": 2}
    said = [assistant_message(call_text("calculator", arguments), "call")]
    parsed = deepcopy(said)
    parsed[0]["tool_calls"][0]["function"]["arguments"] = json.loads(
        said[0]["tool_calls"][0]["function"]["arguments"]
    )
    question = [{"role": "user", "content": "q"}]
    assert chat.first_prompt(question + said) == chat.first_prompt(question + parsed)


async def test_the_loop_goes_on_while_long_messages_are_encoded() -> None:
    going_on = threading.Event()

    def encode() -> list[int]:
        assert going_on.wait(60)  # set by the loop, which therefore goes on
        return [1, 2]

    asyncio.get_running_loop().call_soon(going_on.set)
    long = [{"role": "tool", "content": "x" * LONG_TEXT}, {"role": "assistant", "content": None}]
    assert await encoded(long, encode) == [1, 2]


async def test_short_messages_are_encoded_at_once() -> None:
    found = encoded([{"role": "tool", "content": "x"}], lambda: [threading.get_ident()])
    assert await found == [threading.get_ident()]
