"""Templates of published models: their calls are read, written alike, and grown token by token."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import get_args

import pytest
from real_templates import TEMPLATES, RealTemplate, chat_of, tokenizer_of
from scripted_generation import ScriptedGeneration, a_sample
from trl.chat_template_utils import add_response_schema, parse_response

from composer_mesh.actors.models.tokenizer import chat_settings
from composer_mesh.configs.policy import ToolCallFormat
from composer_mesh.rollouts.call_formats.choosing import KNOWN
from composer_mesh.rollouts.chat import NO_THOUGHT, ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.episode import EpisodePlayer
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ToolCall,
    call_text,
    parse_action,
    parse_calls,
)
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

QUESTION: Message = {"role": "user", "content": "How much is it?"}
FIRST = call_text("lookup", {"key": 'a "quoted" key, ünder ’it’'})
SECOND = call_text("calculator", {"op": "add", "a": 2, "b": -3.5})
NO_SUCH = call_text("look_up", {"key": "x"})


@pytest.fixture(params=TEMPLATES, ids=lambda one: one.file)
def template(request: pytest.FixtureRequest) -> RealTemplate:
    return request.param


@pytest.fixture
def chat(template: RealTemplate, toolbox: ToolboxTask) -> ChatFormat:
    return chat_of(template, toolbox.tools)


def native(chat: ChatFormat, text: str) -> str:
    """The action as the model writes it."""
    return chat.raw_text(chat.action(text))


def test_only_deepseek_writes_no_tools_and_has_them_in_the_system_message(
    template: RealTemplate, chat: ChatFormat
) -> None:
    placed = "system" if template.calls == "deepseek" else "template"
    assert chat.described == (
        f'tools_in = "{placed}", {template.calls} calls by the template, results by the template'
    )


def test_the_format_is_chosen_by_what_the_template_writes(
    template: RealTemplate, chat: ChatFormat
) -> None:
    assert chat.style.format.name == template.calls
    check_chat(chat, hints=template.calls not in ("gemma", "deepseek"))


def test_a_call_that_was_written_natively_is_read_as_that_call(chat: ChatFormat) -> None:
    for text in (FIRST, SECOND, NO_SUCH):
        assert parse_action(chat.readable(native(chat, text))) == parse_action(text)


def test_calls_in_one_action_are_read_in_order(template: RealTemplate, chat: ChatFormat) -> None:
    both = f"{FIRST}\n{SECOND}"
    found = parse_calls(chat.readable(native(chat, both)))
    if template.calls == "harmony":
        assert isinstance(found, MalformedCall)
        assert "exactly one" in found.reason
    else:
        assert found == parse_calls(both)


@pytest.mark.parametrize("left", [0.3, 0.6, 0.9])
def test_a_call_that_is_cut_is_never_a_call_and_an_answer_only_before_it_begins(
    template: RealTemplate, chat: ChatFormat, left: float
) -> None:
    whole = native(chat, FIRST)
    text = whole[: int(len(whole) * left)]
    found = parse_action(chat.readable(text))
    assert not isinstance(found, ToolCall)
    if left > 0.5 and template.calls != "llama_json":
        assert isinstance(found, MalformedCall)


def test_text_beside_a_call_and_thinking_before_it_are_kept(
    template: RealTemplate, chat: ChatFormat
) -> None:
    text = f"<think>Look it up.</think>{FIRST}"
    written = native(chat, text)
    assert parse_action(chat.readable(written)) == parse_action(FIRST)
    assert "Look it up." in chat.readable(written).partition("<tool_call>")[0]


def test_an_answer_is_an_answer(chat: ChatFormat) -> None:
    for text in ("Answer: 4", "", "{not JSON", "It is [4]."):
        found = chat.readable(native(chat, text))
        assert found.endswith(NO_THOUGHT + text if chat.opens_thought else text)
        assert found.removesuffix(text).strip().split() == ["<think>", "</think>"] * bool(
            chat.opens_thought
        )
        assert parse_action(found) is None


OPENS_THOUGHT = {
    *("qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super"),
    *("nemotron_3_ultra", "deepseekv3"),
}


def test_an_action_closes_the_thought_that_its_prompt_opened(
    template: RealTemplate, chat: ChatFormat
) -> None:
    assert chat.opens_thought == (template.file in OPENS_THOUGHT)
    if not chat.opens_thought:
        assert chat.raw_text(chat.action("Answer: 4")).endswith("Answer: 4")
        assert "</think>" not in chat.raw_text(chat.action(FIRST))
        return
    prompt = chat.first_prompt([QUESTION])
    for text, thought in ((FIRST, ""), ("Answer: 4", ""), ("<think>\nhm\n</think>\n\n4", "hm")):
        action = chat.action(text)
        said = chat.tokenizer.decode([*prompt, *action[:-1]]).rpartition("<think>")[2]
        inside, _, answer = said.partition("</think>")
        assert inside.strip() == thought
        assert "</think>" not in answer
        assert parse_action(chat.readable(f"</think>{answer}")) == parse_action(text)
    assert chat.raw_text(chat.action("<think>\nhm")) == "hm"


def test_what_stands_in_a_thought_that_the_prompt_opened_is_neither_call_nor_answer(
    template: RealTemplate, chat: ChatFormat
) -> None:
    """Also where the thought never ends, or its end seems to stand inside a call."""
    if not chat.opens_thought:
        return
    call = native(chat, FIRST).partition("</think>")[2].lstrip()
    open_call = parse_action(chat.readable(f"Should I? {call}"))
    assert isinstance(open_call, MalformedCall)
    assert "not closed" in open_call.reason
    inside = native(chat, call_text("lookup", {"key": "</think>"})).partition("</think>")[2]
    assert not isinstance(parse_action(chat.readable(f"Or {inside.lstrip()}")), ToolCall)
    assert parse_action(chat.readable(f"Should I? {call}\nNo.</think>It is 4.")) is None
    assert parse_action(chat.readable(f"I should.</think>\n{call}")) == parse_action(FIRST)
    assert canonical_action(chat.readable("Maybe Answer: 5")).kind == "malformed"
    assert canonical_action(chat.readable("Yes.</think>\nAnswer: 5")).kind == "number"


def test_a_call_in_the_format_of_another_family_is_malformed_here(
    template: RealTemplate, chat: ChatFormat
) -> None:
    if template.calls == "hermes":
        return
    found = parse_action(chat.readable(FIRST))
    assert isinstance(found, MalformedCall)


class OneEpisode:
    """The port of environments, for one episode of the toolbox with parallel calls."""

    def __init__(self, task: ToolboxTask) -> None:
        self.running = RunningEpisode(task, task.episode("train", 0))
        self.steps: list[StepResult] = []

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        return await self.running.begin()

    async def step(self, session_id: str, text: str, _turn: object = None) -> StepResult:
        self.steps.append(await self.running.step(text))
        return self.steps[-1]

    async def finish(self, session_id: str) -> Outcome:
        return await self.running.outcome()

    def abandon(self, session_id: str) -> None:
        pass


async def test_a_rollout_has_its_calls_parallel_calls_errors_and_thinking(
    template: RealTemplate, chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    task = ToolboxTask()
    task.settings = TaskSettings(calls_per_turn=2)
    look = call_text("lookup", {"key": "price"})
    add = call_text("calculator", {"op": "add", "a": 2, "b": 3})
    several = f"{add}\n{look}" if template.calls != "harmony" else add
    thinks = "<think>First look.</think>"
    texts = [thinks + look, several, NO_SUCH, "Answer: 5"]
    places = OneEpisode(task)
    scripted = ScriptedGeneration(chat, *texts)
    sample = a_sample(max_new_tokens=1_000, max_context=20_000)
    played = await EpisodePlayer(scripted, places, chat).play(sample, "s")
    assert [step.error.error_kind if step.error else None for step in places.steps][2] == (
        "unknown_tool"
    )
    spoken = [one for one in played.trace.messages if one["role"] == "assistant"]
    names = [[c["function"]["name"] for c in one.get("tool_calls", [])] for one in spoken]
    wanted = ["calculator", "lookup"] if template.calls != "harmony" else ["calculator"]
    assert names == [["lookup"], wanted, ["look_up"], []]
    assert [len(turn.action_ids) for turn in played.trace.turns] == [
        len(result.token_ids) for result in scripted.results
    ]


def test_trls_parser_reads_the_same_calls(template: RealTemplate, toolbox: ToolboxTask) -> None:
    """It is lenient, so it is no reader here; on whole calls it is right."""
    chat = chat_of(template, toolbox.tools)
    tokenizer = deepcopy(tokenizer_of(template))
    try:
        add_response_schema(tokenizer)
    except ValueError:
        pytest.skip(f"TRL has no parser for {template.file}")
    call = call_text("calculator", {"op": "add", "a": 2, "b": 3})
    prefix = chat.first_prompt([QUESTION])
    opened = chat.tokenizer.decode(prefix).endswith("<think>\n")
    ids = chat.action(f"\n</think>\n\n{call}" if opened else call)
    parsed = parse_response(tokenizer, ids, prefix, tools=toolbox.tools)
    (made,) = parsed["tool_calls"]
    assert made["function"] == {"name": "calculator", "arguments": {"op": "add", "a": 2, "b": 3}}


def named(file: str) -> RealTemplate:
    return next(one for one in TEMPLATES if one.file == file)


@pytest.mark.parametrize("file", ["llama3_1", "gptoss", "glm4moe", "qwen3"])
def test_what_ends_an_action_is_written_once_whatever_was_sampled(
    file: str, toolbox: ToolboxTask
) -> None:
    template = named(file)
    chat = chat_of(template, toolbox.tools)
    for text, follow in ((FIRST, {"role": "tool", "content": "4"}), ("Answer: 4", QUESTION)):
        action = chat.action(text)
        whole, cut = chat.continuation([follow], action), chat.continuation([follow], action[:-1])
        assert cut[1:] == whole
        for stop in chat.stop_ids:
            other = chat.continuation([follow], [*action[:-1], stop])
            # GLM ends an action with what begins the next message, which is written in any case.
            begins = file == "glm4moe" and stop != cut[0]
            assert other == (cut if begins else whole)


@pytest.mark.parametrize("file", ["llama3_2", "gptoss"])
def test_prompts_with_a_date_have_the_pinned_one_whatever_day_it_is(file: str) -> None:
    template = named(file)

    def prompt(date: str | None) -> str:
        chat = ChatFormat(tokenizer_of(template), [], stops=template.stops, date=date)
        return chat.raw_text(chat.first_prompt([QUESTION]))

    written = {"llama3_2": "31 Jan 2001", "gptoss": "2001-01-31"}[file]
    assert written in prompt("2001-01-31")
    assert prompt("2001-01-31") != prompt("2001-02-01")
    assert written not in prompt(None)


def test_the_stop_tokens_of_a_folder_are_read(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(named("llama3_1"))
    ends = [tokenizer.convert_tokens_to_ids(one) for one in ("<|eot_id|>", "<|eom_id|>")]
    file = tmp_path / "generation_config.json"
    given = {"stops": ["<|python_tag|>"], "tool_calls": "auto", "options": {"a": 1}}
    assert chat_settings(tmp_path, tokenizer, given)["stops"] == ("<|python_tag|>",)
    file.write_text(json.dumps({"eos_token_id": ends}))
    found = chat_settings(tmp_path, tokenizer, given)
    assert found == {**given, "stops": ("<|eom_id|>", "<|python_tag|>")}
    with pytest.raises(ValueError, match=r"has '<\|no\|>', which is not a token of the tokenizer"):
        chat_settings(tmp_path, tokenizer, {**given, "stops": ["<|no|>"]})
    for wrong in (10**9, -1, "x", True):
        file.write_text(json.dumps({"eos_token_id": [wrong]}))
        with pytest.raises(ValueError, match=r"generation_config\.json has the eos_token_id"):
            chat_settings(tmp_path, tokenizer, given)


def test_formats_that_the_config_names_are_those_that_are_known() -> None:
    names = list(dict.fromkeys(one.name for one in KNOWN))
    assert list(get_args(ToolCallFormat)) == ["auto", *names]


@pytest.mark.parametrize("content", ["12 apples", '{"result": 3.5}', "0", "a\nb <tool_response>"])
def test_the_content_of_each_result_is_found_among_the_ids_of_a_continuation(
    chat: ChatFormat, content: str
) -> None:
    action = chat.action(FIRST)
    results: list[Message] = [{"role": "tool", "content": content, "name": "lookup"}]
    ids = chat.continuation(results, action)
    (span,) = chat.contents(results, action, ids)
    found = chat.tokenizer.decode([ids[place] for place in span])
    escaped = json.dumps(content, ensure_ascii=False)[1:-1]  # by Llama 3's template and gpt-oss's
    assert content in found or escaped in found
    assert len(found) <= len(escaped) + 8  # what shares a token with the content
