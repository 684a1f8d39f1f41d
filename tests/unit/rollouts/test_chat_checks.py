"""Chat templates and tokenizers: those that can take hints do, the others are refused at load.

Tools, calls and results reach the model, also where its chat template leaves them out.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import chat_templates
import pytest
from chat_templates import FOR, USABLE, with_template
from tokenizers import processors

from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.rollouts.alignment import hinted_view
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.tool_calls import assistant_message, call_text, parse_calls
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
        "after a tool result the chat template ends with .* use a template that ends every",
    ),
    "plain text": (chat_templates.PLAIN_TEXT, "set off by a control token"),
    "drops content": (chat_templates.DROPS_CONTENT, "does not write a question: 'qzquestion' is"),
    "drops system messages": (chat_templates.DROPS_SYSTEM, "neither tools nor system messages"),
    "writes contents twice": (chat_templates.WRITES_TWICE, "writes a user message 2 times"),
    "merges into tools": (chat_templates.MERGES_INTO_TOOLS, "a hint cannot follow both"),
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
