"""Requests of one episode: which are the same one, and which are sampled anew.

Workflows of agents as they are: what they sample by HTTP is trained, and their answer scored.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from openai import AsyncOpenAI, OpenAIError
from scripted_generation import ScriptedGeneration, a_sample
from workflow_ports import Ports, sample

from composer_mesh import Agent, AgentWorkflow, CommandAgent, FunctionAgent, Message
from composer_mesh.actors.rollout_workers import agent_episode
from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    EpisodeEnded,
    Exchange,
    TooManyTurns,
)
from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import LONG_TEXT, ChatFormat
from composer_mesh.rollouts.episode import EpisodePlayer, Played
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.errors import TaskError, UnusableTask
from composer_mesh.tasks.toolbox import ToolboxTask

ASK = Ask([ChatQuestion([{"role": "user", "content": "q"}], [])])


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@pytest.fixture
def generation(chat: ChatFormat) -> ScriptedGeneration:
    return ScriptedGeneration(chat, "one", "two", "three")


def an_episode(
    chat: ChatFormat, generation: Any, retry_wait_s: float = 600.0, **sampling: Any
) -> AgentEpisode:
    sample = a_sample(**sampling)
    return AgentEpisode(
        CaptureFormat.of(chat, 500), generation, sample, sample.sampling, retry_wait_s
    )


def said(exchange: Exchange) -> list[str]:
    return [turn.answer["content"] for turn in exchange.turns]


async def lost(episode: AgentEpisode, generation: ScriptedGeneration) -> None:
    """A request whose connection is lost while it is sampled."""
    generation.open.clear()
    asking = asyncio.create_task(episode.answer(ASK, b"k", False))
    await generation.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_request_that_follows_a_lost_connection_joins_its_sampling(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    await lost(episode, generation)
    generation.open.set()
    exchange = await episode.answer(ASK, b"k", False)
    episode.release(exchange, sent=True)
    assert said(exchange) == ["one"]
    assert len(generation.requests) == 1


async def test_an_answer_that_could_not_be_sent_is_kept_for_the_next_request(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    first = await episode.answer(ASK, b"k", False)
    episode.release(first, sent=False)
    assert episode.trajectories() == []
    asked, answer = len(generation.requests[0].prompt_ids), generation.results[0]
    assert episode.tokens == Counter(prompt=asked, sampled=len(answer.token_ids))
    assert await episode.answer(ASK, b"k", False) is first
    episode.release(first, sent=True)
    assert len(episode.trajectories()) == 1


async def test_a_retry_gets_an_answer_that_was_sent_too(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    first = await episode.answer(ASK, b"k", False)
    episode.release(first, sent=True)
    assert await episode.answer(ASK, b"k", True) is first
    assert said(await episode.answer(ASK, b"other", True)) == ["two"]


class SlowlyRendered(ChatFormat):
    """Renders no prompt before the event loop has continued."""

    continued: ClassVar[threading.Event]

    def first_prompt(self, messages: list[Message]) -> list[int]:
        assert self.continued.wait(60)
        return super().first_prompt(messages)


LONG = Ask([ChatQuestion([{"role": "user", "content": "x" * LONG_TEXT}], [])])


def slowly_rendered(chat: ChatFormat, generation: ScriptedGeneration) -> AgentEpisode:
    SlowlyRendered.continued = threading.Event()
    slow = SlowlyRendered(chat.tokenizer, [])
    return an_episode(slow, generation, max_context=200_000)


async def test_the_loop_continues_while_a_long_prompt_is_made_and_a_retry_gets_its_answer(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = slowly_rendered(chat, generation)
    asking = [asyncio.create_task(episode.answer(LONG, b"k", retry)) for retry in (False, True)]
    asyncio.get_running_loop().call_soon(SlowlyRendered.continued.set)
    first, second = await asyncio.gather(*asking)
    assert first is second
    assert len(generation.requests) == 1


async def test_an_episode_that_ends_while_a_long_prompt_is_made_samples_nothing(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = slowly_rendered(chat, generation)
    asking = asyncio.create_task(episode.answer(LONG, b"k", False))
    await asyncio.sleep(0)
    await episode.close()
    SlowlyRendered.continued.set()
    with pytest.raises(EpisodeEnded):
        await asking
    assert generation.requests == []


async def test_equal_requests_at_the_same_time_are_two_samples(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    found = await asyncio.gather(*(episode.answer(ASK, b"k", False) for _ in range(2)))
    assert [said(one) for one in found] == [["one"], ["two"]]
    assert [one.trained for one in episode.trajectories()] == [[True], [True]]


async def test_without_a_retry_a_lost_request_is_given_up(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation, retry_wait_s=0)
    await lost(episode, generation)
    await generation.gave_up.wait()
    generation.open.set()
    assert said(await episode.answer(ASK, b"k", True)) == ["one"]
    assert len(generation.requests) == 2


async def test_a_closed_episode_samples_nothing_more(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    generation.open.clear()
    asking = asyncio.create_task(episode.answer(ASK, b"k", False))
    await generation.asked.wait()
    await episode.close()
    with pytest.raises(EpisodeEnded):
        await asking
    with pytest.raises(EpisodeEnded):
        await episode.answer(ASK, b"k", False)
    assert generation.cancelled == ["train-000000-000-00"]


async def test_one_failed_answer_of_several_ends_the_others(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    generation.texts[1:] = [RuntimeError("no generator"), "three"]
    episode = an_episode(chat, generation)
    with pytest.raises(RuntimeError, match="no generator"):
        await episode.answer(Ask(ASK.questions, n=3), b"k", False)
    assert episode.trajectories() == []
    assert len(episode.failures()) == 1


async def test_an_episode_asks_for_a_bounded_number_of_answers(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    with pytest.raises(TooManyTurns, match="may request 4096"):
        await episode.answer(Ask(ASK.questions, n=agent_episode.MOST_TURNS + 1), b"k", False)
    assert generation.requests == []


@pytest.fixture
def ports(toolbox: ToolboxTask, tokenizer: Any) -> Ports:
    answer = toolbox.verified_answer(toolbox.episode("train", 0))
    return Ports(toolbox, ChatFormat(tokenizer, toolbox.tools), lambda _: f"Answer: {answer}")


async def played_counted(ports: Ports, workflow: AgentWorkflow) -> Played:
    player = WorkflowPlayer(workflow, ports, ports, ports.chat, 60.0)
    try:
        return await player.play(sample(ports.task), "train-000000-000")
    finally:
        await player.close()


async def played(ports: Ports, workflow: AgentWorkflow) -> Trace:
    return (await played_counted(ports, workflow)).trace


class Asks(AgentWorkflow):
    """Asks once, with the tools of the task."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.tools = tools

    async def solve(self, messages: list[Message], agent: Agent) -> str:
        async with AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
            asked: Any = {"messages": messages, "tools": self.tools}
            answer = await client.chat.completions.create(model="any", **asked)
        return answer.choices[0].message.content or ""


async def test_what_an_agent_samples_is_the_native_loops_trajectory(ports: Ports) -> None:
    found = await played_counted(ports, Asks(ports.task.tools))
    trace = found.trace
    native = await EpisodePlayer(ports, ports, ports.chat).play(sample(ports.task), "native")
    assert [turn.context_ids for turn in trace.turns] == [
        turn.context_ids for turn in native.trace.turns
    ]
    assert [turn.action_ids for turn in trace.turns] == [
        turn.action_ids for turn in native.trace.turns
    ]
    assert (trace.reward, trace.success, trace.rewards) == (1.0, True, {"solved": 1.0})
    assert found.prompt_tokens == native.prompt_tokens > 0


def asks_by_http(messages: list[Message], base_url: str, api_key: str) -> str:
    """A plain function without any client library."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


async def test_a_plain_function_is_an_agent(ports: Ports) -> None:
    trace = await played(ports, FunctionAgent(f"{__name__}:asks_by_http"))
    assert (trace.reward, len(trace.turns)) == (1.0, 1)


PROGRAM = """
import json, os, sys
sys.path[:0] = {folders!r}
from test_agent_episode import asks_by_http
messages = json.load(sys.stdin)["messages"]
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
asks_by_http(messages, url, key)
print(asks_by_http(messages, url, key))
"""


async def test_a_program_is_an_agent_and_each_of_its_requests_is_trained_once(
    ports: Ports, tmp_path: Path
) -> None:
    program = tmp_path / "agent.py"
    folder = Path(__file__).parent
    folders = [str(folder), str(folder.parents[1] / "helpers")]
    program.write_text(PROGRAM.format(folders=folders))
    trace = await played(ports, CommandAgent([sys.executable, str(program)]))
    assert trace.reward == 1.0
    trained = [turn for one in trace.trajectories() for turn in one.turns if turn.trained]
    assert len(trained) == len(ports.requests) == 2
    assert len({one.trace_id for one in trace.trajectories()}) == 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no key')", "ended with status 1: no key"),
        ("import time; time.sleep(600)", r"did not end within 0\.5 s: raise timeout_s"),
        ("print('Answer: 1')", "has requested nothing from its endpoint"),
    ],
)
async def test_a_program_that_fails_hangs_or_asks_nothing_fails_its_attempt(
    ports: Ports, code: str, said: str
) -> None:
    limit = 0.5 if "sleep" in code else 60.0
    with pytest.raises(TaskError, match=said):
        await played(ports, CommandAgent([sys.executable, "-c", code], timeout_s=limit))
    assert not ports.sessions


async def test_a_generator_that_fails_is_no_fault_of_the_agent(ports: Ports) -> None:
    def fails(_: int) -> str:
        raise ConnectionResetError("the generator is gone")

    ports.answer = fails

    class Robust(Asks):
        async def solve(self, messages: list[Message], agent: Agent) -> str:
            try:
                return await super().solve(messages, agent)
            except OpenAIError:
                return call_text("lookup", {"key": "x"})

    with pytest.raises(Exception, match="the generator is gone"):
        await played(ports, Robust([]))


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(UnusableTask, match="function is 'nowhere:solve', which cannot be imported"):
        FunctionAgent("nowhere:solve")
