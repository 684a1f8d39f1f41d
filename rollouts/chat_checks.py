"""Checks that a chat template and tokenizer can extend conversations by ids and take hints.

They run once, when a policy is loaded, before anything is sampled or trained. Each check's error
message states what it guards; `chat` relies on them.
"""

import json
from collections.abc import Sequence

from jinja2 import TemplateError

from composer_mesh.rollouts.call_formats.choosing import EXAMPLE, calling
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.chat_template import PROBE_CALL
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Message

_USER = {"role": "user", "content": "q"}
_TOOL = {"role": "tool", "content": "4", "tool_call_id": EXAMPLE.id}


def check_chat(chat: ChatFormat, *, hints: bool) -> None:
    """Raise ChatTemplateError if a run, or with `hints` its SDPO channel, would get wrong ids."""
    _adds_nothing(chat)
    _tools_are_text(chat)
    _ends_with_the_prompt(chat, "a question", [_USER])
    _ends_with_the_prompt(chat, "a remark", [_USER], chat.action("a"))
    if chat.tools:
        called = chat.action(call_text(EXAMPLE.name, EXAMPLE.arguments))
        _ends_with_the_prompt(chat, "a tool result", [_TOOL], called, hints=hints)
    _writes_what_is_sent(chat)
    if hints:
        _hint_is_one_message(chat)


def _adds_nothing(chat: ChatFormat) -> None:
    """Refuse a tokenizer that adds a BOS to every piece, and so inside a conversation."""
    added = chat.tokenizer.encode("", add_special_tokens=False)
    if added:
        raise ChatTemplateError(
            f"the tokenizer makes {added} of an empty text without special tokens, so each piece "
            "of a conversation would begin with them: turn off its add_bos_token and "
            "add_eos_token, since the chat template writes what is needed"
        )


def _tools_are_text(chat: ChatFormat) -> None:
    """Refuse tools that would write control tokens: a server may have described them."""
    found = chat.control_token(json.dumps(chat.tools, ensure_ascii=False))
    if found is not None:
        raise ChatTemplateError(
            f"the tools hold the control token {found!r}, which would be read as one: reword their "
            "names and descriptions"
        )


def _writes_what_is_sent(chat: ChatFormat) -> None:
    """Require each content, tool, call and result in what the model reads."""
    question, remark = _said("user", "qzquestion"), _said("user", "qzremark")
    system = [_said("system", chat.system)] if chat.system else []
    write = chat.template.text
    first = write([*system, question], True, chat.tools)
    _require(first, "the system message", chat.system.strip())
    _require(first, "a question", "qzquestion")
    for tool in chat.tools:
        function = tool["function"]
        parameters = (function.get("parameters") or {}).get("properties") or {}
        _require(first, f"the tool {function['name']}", function["name"], *parameters)
    _require(chat.template.after_answer([remark], True), "a remark", "qzremark")
    if chat.tools:
        result = {**_said("tool", "qzresult"), "tool_call_id": PROBE_CALL.id}
        again = write([question, calling(PROBE_CALL), result], True)
        _require(again, "an earlier call", PROBE_CALL.name, *PROBE_CALL.arguments.values())
        _require(again, "a tool's result", "qzresult")


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _require(text: str, what: str, *words: str) -> None:
    missing = [word for word in words if word not in text]
    if missing:
        raise ChatTemplateError(
            f"the chat template does not write {what}: {', '.join(map(repr, missing))} is not in "
            "what it renders, so the model would never read it: use a template that writes it"
        )


def _ends_with_the_prompt(
    chat: ChatFormat,
    what: str,
    messages: list[Message],
    action: Sequence[int] | None = None,
    hints: bool = True,
) -> None:
    """Require the same generation prompt after every context, as `hints` are inserted before it."""
    prompt = chat.generation_prompt
    try:
        first = action is None
        ids = chat.first_prompt(messages) if first else chat.continuation(messages, action or ())
    except TemplateError as error:
        raise ChatTemplateError(
            f"the chat template refuses {what} ({error}): use one that takes messages of the role "
            f"{messages[-1]['role']!r}"
        ) from None
    if hints and ids[len(ids) - len(prompt) :] != prompt:
        raise ChatTemplateError(
            f"after {what} the chat template ends with the ids {ids[-len(prompt) :]} but its "
            f"generation prompt alone is {prompt}, so an action has no certain beginning: use a "
            "template that ends every context with one generation prompt, set off by a control "
            "token"
        )


def _hint_is_one_message(chat: ChatFormat) -> None:
    """Require that a user message is rendered alike after a question and after a tool result."""
    mark = _said("user", "qzhint")
    frame = chat.hint_text(mark)
    if (count := frame.count("qzhint")) != 1:
        raise ChatTemplateError(
            f"the chat template writes a user message {count} times, changed or not at all, so a "
            "hint has no place: use one that writes each content once"
        )
    if not chat.tools:
        return
    answered = [_USER, calling(EXAMPLE), _TOOL]
    added = chat.added_by(answered, mark)
    if added is not None and added != frame:
        raise ChatTemplateError(
            f"the chat template writes a user message as {frame!r} after a question but as "
            f"{added!r} after a tool result, so a hint cannot follow both: use a template that "
            "writes both alike, or set sdpo.alpha to 0"
        )
