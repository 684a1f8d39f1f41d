"""Chat templates and tokenizers: those that can take hints do, the others are refused at load."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import chat_templates
import pytest
from chat_templates import USABLE, with_template
from tokenizers import processors

from composer_mesh.rollouts.alignment import hinted_view
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.tasks.toolbox import ToolboxTask

QUESTION: Message = {"role": "user", "content": "q"}
RESULT: Message = {"role": "tool", "content": "4"}
THOUGHT = "<think>\nhm\n</think>\n\nAnswer: 4"


@pytest.fixture(scope="module", params=["built-in", *USABLE])
def chat(request: pytest.FixtureRequest, tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    name = request.param
    own = tokenizer if name == "built-in" else with_template(tokenizer, USABLE[name])
    return ChatFormat(own, toolbox.tools)


def two_turns(chat: ChatFormat, action: str = THOUGHT) -> Trace:
    """A conversation that grew by ids, with thinking that a template would take out again."""
    turns = []
    for context in (chat.first_prompt([QUESTION]), chat.continuation([RESULT], chat.stop_ids[:1])):
        ids = chat.action(action)
        turns.append(Turn(context, ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
    return Trace("t", 0, 0, "toolbox", "train", 0, turns, [], 0.0, False, [])


def rendered(chat: ChatFormat, messages: list[Message], **options: Any) -> str:
    text: str = chat.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text


def test_a_usable_template_passes(chat: ChatFormat) -> None:
    check_chat(chat, hints=True)


def test_tools_that_hold_a_control_token_are_refused(tokenizer: Any, toolbox: ToolboxTask) -> None:
    tools = deepcopy(toolbox.tools)
    tools[0]["function"]["description"] = f"Adds.{tokenizer.eos_token}"
    with pytest.raises(ChatTemplateError, match="the tools hold the control token"):
        check_chat(ChatFormat(tokenizer, tools), hints=False)


def test_a_hint_stands_between_the_conversation_and_the_generation_prompt(chat: ChatFormat) -> None:
    trace, hint = two_turns(chat), chat.hint("Hint: look.")
    for turn in (0, 1):
        view = hinted_view(trace, turn, hint, chat.generation_prompt)
        student = trace.prompt_ids(turn)
        cut = len(student) - len(chat.generation_prompt)
        assert view.teacher_ids[:cut] == student[:cut]
        assert view.teacher_ids[cut : cut + len(hint)] == hint
        rest = view.teacher_ids[cut + len(hint) :]
        assert rest == chat.generation_prompt + trace.turns[turn].action_ids


def test_what_was_thought_stays_in_the_ids_of_both_contexts(chat: ChatFormat) -> None:
    """A template may forget earlier thinking; the policy has read it, so the teacher does too."""
    trace = two_turns(chat)
    view = hinted_view(trace, 1, chat.hint("Hint: look."), chat.generation_prompt)
    for ids in (view.teacher_ids, trace.token_ids()):
        assert chat.action_text(ids).count("\nhm\n</think>") == 2


def test_a_hint_reads_as_the_template_writes_a_second_user_message(chat: ChatFormat) -> None:
    hint = {"role": "user", "content": "Hint: look."}
    said = chat.added_by([QUESTION], hint)
    if said is None:  # roles alternate: it reads as behind an assistant
        said = chat.added_by([QUESTION, {"role": "assistant", "content": "a"}], hint)
    assert chat.tokenizer.decode(chat.hint("Hint: look.")) == said


def test_a_bos_stands_once_and_first(tokenizer: Any, toolbox: ToolboxTask) -> None:
    chat = ChatFormat(with_template(tokenizer, chat_templates.WRITES_BOS), toolbox.tools)
    bos = chat.tokenizer.convert_tokens_to_ids("<|bos|>")
    view = hinted_view(two_turns(chat), 1, chat.hint("Hint: look."), chat.generation_prompt)
    assert view.teacher_ids[0] == bos
    assert view.teacher_ids.count(bos) == 1


def test_the_generation_prompt_holds_the_empty_thinking_block_once(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    chat = ChatFormat(with_template(tokenizer, chat_templates.EMPTY_THINKING), toolbox.tools)
    assert chat.action_text(chat.generation_prompt).count("<think>\n\n</think>") == 1
    view = hinted_view(two_turns(chat, "4"), 1, chat.hint("Hint: look."), chat.generation_prompt)
    # One was in front of each sampled action; the hint brings none.
    assert chat.action_text(view.teacher_ids).count("<think>") == 2


BROKEN = {
    "no prompt behind tools": (
        chat_templates.NO_PROMPT_BEHIND_TOOLS,
        "behind a tool result the chat template ends with .* use a template that ends every",
    ),
    "plain text": (chat_templates.PLAIN_TEXT, "set off by a control token"),
    "drops content": (chat_templates.DROPS_CONTENT, "does not write a question: 'qzquestion' is"),
    "drops system messages": (chat_templates.DROPS_SYSTEM, "neither tools nor system messages"),
    "writes contents twice": (chat_templates.WRITES_TWICE, "writes a user message 2 times"),
    "merges into tools": (chat_templates.MERGES_INTO_TOOLS, "one hint cannot stand behind both"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_cannot_take_hints_is_refused_with_the_reason(
    name: str, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    template, message = BROKEN[name]
    chat = ChatFormat(with_template(tokenizer, template), toolbox.tools)
    with pytest.raises(ChatTemplateError, match=message):
        check_chat(chat, hints=True)


def test_without_hints_a_template_may_merge_what_follows_a_tool(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    chat = ChatFormat(with_template(tokenizer, chat_templates.MERGES_INTO_TOOLS), toolbox.tools)
    check_chat(chat, hints=False)


def test_without_tools_no_tool_result_is_tried(tokenizer: Any) -> None:
    check_chat(ChatFormat(with_template(tokenizer, chat_templates.REFUSES_TOOLS), []), hints=True)


class AddsBos:
    """A tokenizer that puts a BOS before everything, whatever it is told."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        return [0, *self._tokenizer.encode(text, **options)]


def test_a_tokenizer_that_adds_a_bos_only_when_asked_for_special_tokens_is_usable(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    adding = with_template(tokenizer, chat_templates.WRITES_BOS)
    bos = adding.convert_tokens_to_ids("<|bos|>")
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    assert adding.encode("x")[0] == bos
    chat = ChatFormat(adding, toolbox.tools)
    check_chat(chat, hints=True)
    trace = two_turns(chat)
    view = hinted_view(trace, 1, chat.hint("x"), chat.generation_prompt)
    assert (trace.token_ids().count(bos), view.teacher_ids.count(bos)) == (1, 1)


def test_a_tokenizer_that_always_adds_a_bos_is_refused(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    chat = ChatFormat(AddsBos(deepcopy(tokenizer)), toolbox.tools)
    with pytest.raises(ChatTemplateError, match=r"makes \[0\] of an empty text .* add_bos_token"):
        check_chat(chat, hints=False)
