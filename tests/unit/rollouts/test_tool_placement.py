"""Tools, calls and results reach the model, also where its chat template leaves them out."""

from __future__ import annotations

from typing import Any

import chat_templates
import pytest
from chat_templates import FOR, with_template

from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.tool_calls import assistant_message, call_text, parse_calls
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.toolbox import ToolboxTask

TURN = "'<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n'"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
ROLES_ALONE = FOR + "{{ " + TURN + " }}{% endfor %}" + PROMPT
"""As SmolLM2 writes: role and content alone."""
NO_TOOL_ROLE = (
    FOR + "{% if m.role in ['user', 'system', 'assistant'] %}{{ " + TURN + " }}{% endif %}"
    "{% endfor %}" + PROMPT
)
"""As Zephyr, TinyLlama and Phi-3 write: nothing for a tool's result."""
NO_SYSTEM_ROLE = (
    FOR + "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ " + TURN + " }}{% endfor %}" + PROMPT
)
"""As Gemma 2 writes."""

QUESTION: Message = {"role": "user", "content": "q"}
CALL = call_text("lookup", {"key": "price"})


def chat_of(tokenizer: Any, template: str, toolbox: ToolboxTask, **more: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, template), toolbox.tools, **more)


def read(chat: ChatFormat, ids: list[int]) -> str:
    return chat.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [ROLES_ALONE, NO_TOOL_ROLE, chat_templates.REFUSES_TOOLS])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_calls_and_results_are_written_as_text_where_the_template_leaves_them_out(
    template: str, system: str, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    chat = chat_of(tokenizer, template, toolbox, system=system)
    check_chat(chat, hints=True)
    first = read(chat, chat.first_prompt([QUESTION]))
    assert first.startswith(f"<|im_start|>system\n{system}")
    assert first.count("<|im_start|>system") == 1
    for tool in toolbox.tools:
        assert f'"name": "{tool["function"]["name"]}"' in first
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}' in first
    after = read(chat, chat.continuation([{"role": "tool", "content": "4711"}], chat.action(CALL)))
    assert "4711" in after
    history = [QUESTION, assistant_message(CALL, "call"), {"role": "tool", "content": "4711"}]
    whole = read(chat, chat.first_prompt(history))
    said = whole.rpartition("<|im_start|>assistant\n")[0].rpartition("<|im_start|>assistant\n")[2]
    assert parse_calls(said.partition("<|im_end|>")[0]) == parse_calls(CALL)
    assert whole.endswith(after.removeprefix("<|im_end|>"))


def test_results_of_one_action_are_one_user_message(tokenizer: Any, toolbox: ToolboxTask) -> None:
    chat = chat_of(tokenizer, NO_TOOL_ROLE, toolbox)
    results: list[Message] = [{"role": "tool", "content": one} for one in ("4711", "4712")]
    after = read(chat, chat.continuation(results, chat.action(f"{CALL}\n{CALL}")))
    assert after == (
        "\n<|im_start|>user\n<tool_response>\n4711\n</tool_response>\n"
        "<tool_response>\n4712\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_is_chosen_is_described(tokenizer: Any, toolbox: ToolboxTask) -> None:
    by_template = ChatFormat(tokenizer, toolbox.tools)
    in_system = ChatFormat(tokenizer, toolbox.tools, tools_in="system")
    assert [
        one.described
        for one in (
            by_template,
            in_system,
            chat_of(tokenizer, ROLES_ALONE, toolbox),
            chat_of(tokenizer, NO_TOOL_ROLE, toolbox),
            ChatFormat(tokenizer, []),
        )
    ] == [
        'tools_in = "template", hermes calls by the template, results by the template',
        'tools_in = "system", hermes calls by the template, results by the template',
        'tools_in = "system", hermes calls in the assistant\'s text, results by the template',
        'tools_in = "system", hermes calls in the assistant\'s text, results in user messages',
        "no tools",
    ]
    assert "<tools>" not in read(by_template, by_template.first_prompt([QUESTION]))
    check_chat(in_system, hints=True)
    assert "<tools>" in read(in_system, in_system.first_prompt([QUESTION]))


def test_a_named_format_is_the_one_that_is_explained_and_written(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    chat = chat_of(tokenizer, ROLES_ALONE, toolbox, tool_calls="qwen_xml")
    check_chat(chat, hints=True)
    history = [QUESTION, assistant_message(CALL, "call"), {"role": "tool", "content": "1"}]
    whole = read(chat, chat.first_prompt(history))
    assert "<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>" in whole
    assert "<function=lookup>\n<parameter=key>\nprice\n</parameter>" in whole


def test_tools_that_a_template_cannot_write_are_refused_with_the_repair(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    refused = [
        (NO_SYSTEM_ROLE, "auto", "neither tools nor system messages.*use a template that writes"),
        (NO_SYSTEM_ROLE, "system", "neither tools nor system messages"),
        (ROLES_ALONE, "template", "tools_in is 'template' but .*set it to 'system', or leave"),
    ]
    for template, tools_in, words in refused:
        chat = chat_of(tokenizer, template, toolbox, tools_in=tools_in)
        with pytest.raises(ChatTemplateError, match=words):
            check_chat(chat, hints=False)
        with pytest.raises(ChatTemplateError, match=words):
            chat.first_prompt([QUESTION])
    with pytest.raises(ValueError, match=r"tools_in, stop_tokens, .* set path, or remove"):
        PolicyConfig(tools_in="system")


@pytest.mark.parametrize("template", [NO_SYSTEM_ROLE, chat_templates.DROPS_SYSTEM])
def test_a_system_message_that_would_not_be_read_is_refused(template: str, tokenizer: Any) -> None:
    plain = ChatFormat(with_template(tokenizer, template), [])
    check_chat(plain, hints=True)
    own: list[Message] = [{"role": "system", "content": "Be brief."}, QUESTION]
    with pytest.raises(ChatTemplateError, match=r"does not write system messages.*first question"):
        plain.first_prompt(own)
    with pytest.raises(ChatTemplateError, match="does not write system messages"):
        check_chat(ChatFormat(plain.tokenizer, [], "Be brief."), hints=False)


def test_a_template_that_leaves_a_tool_out_is_refused(tokenizer: Any, toolbox: ToolboxTask) -> None:
    first_only = "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + ROLES_ALONE
    with pytest.raises(ChatTemplateError, match=r"does not write the tool \w+: '\w+'"):
        check_chat(chat_of(tokenizer, first_only, toolbox), hints=False)
