"""Workflows: how an episode is played, where one agent with tools is not enough.

    class Debate(Workflow):
        async def run(self, episode, engine):
            first = engine.conversation(episode.payload["question"], role="speaker")
            claim = await first.act()
            critic = engine.conversation(f"What is wrong with this? {claim}", role="critic")
            first.say(await critic.act())
            await first.act()
            outcome = await engine.score(first.messages)
            return [
                first.trajectory(outcome.reward),
                critic.trajectory(outcome.reward),
            ]

Everything that the policy writes here is trained by its own token ids, with the log-probs and
versions that the generator reported. Rewards of a group are compared among trajectories with the
same role.

Workflows that play episodes by agents as they are: a function, or a program.

    class Mine(AgentWorkflow):
        async def solve(self, messages, agent):
            client = AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key)
            ...
            return "Answer: 5"

What the agent samples through its endpoint is captured token by token (docs/agents.md). What it
returns is its answer in a session of the task, whose rewards score all that it sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from composer_mesh.configs.user_code import imported
from composer_mesh.rollouts.generation import GenerationResult
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import ErrorSite, Message, Turn
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import TaskError, UnusableTask
from composer_mesh.tasks.task import Task

if TYPE_CHECKING:
    from typing import Self


class ContextFull(TaskError):
    """A conversation has as many tokens as the model's context holds, so nothing can be added."""


@dataclass(frozen=True)
class Trajectory:
    """A conversation of one agent, to be trained on.

    `reward` is the trajectory's own. Without `advantage` it is compared with those of the same
    `role` in the other samples of the group. `turn_rewards` are the parts of `reward` that belong
    to single turns, and `turn_advantages` are in place of one `advantage`: one number for each of
    `turns`, or none. One that is `screened`, as `Outcome.screened` says, is stored, and nothing of
    it is trained.
    """

    turns: Sequence[Turn]
    messages: Sequence[Message]
    reward: float
    success: bool
    role: str = ""
    advantage: float | None = None
    error_sites: Sequence[ErrorSite] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] = ()
    turn_advantages: Sequence[float] = ()
    screened: bool = False


@dataclass(frozen=True)
class Generated:
    """A sampled continuation: its text, and its ids with a log-prob and a version for each."""

    text: str
    prompt_ids: list[int]
    result: GenerationResult


class Environment(Protocol):
    """A session of the episode's task, which is stepped by the text of actions."""

    @property
    def messages(self) -> list[Message]:
        """The first messages of the session."""

    async def step(self, text: str) -> StepResult:
        """Apply an action."""

    async def finish(self) -> Outcome:
        """Score and close the session."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


class Agent(Protocol):
    """An OpenAI-compatible endpoint for one agent in one episode, which captures what it samples.

    Nothing that the agent gets from it is tokenized again (docs/agents.md).
    """

    base_url: str
    api_key: str

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that clients of OpenAI read."""

    @property
    def answers(self) -> int:
        """How many answers the agent has received.

        Raises the first error of a generator that no retry of the agent has mended.
        """

    def trajectories(
        self,
        reward: float,
        *,
        success: bool | None = None,
        role: str = "",
        rewards: Mapping[str, float] | None = None,
        session: str | None = None,
        screened: bool = False,
    ) -> list[Trajectory]:
        """Return every path of the agent's requests, the longest first, with one reward for all.

        With `session`, only those of requests with that header X-Session-ID. Raises the first error
        of a generator that no retry of the agent has mended.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...


@dataclass(frozen=True)
class Program:
    """Result of a program that has ended: its status, and what it wrote."""

    status: int
    output: str
    errors: str


class Engine(Protocol):
    """What a workflow plays an episode with."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The task's tools in the format of OpenAI's `tools` parameter."""

    async def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        n: int = 1,
        greedy: bool = False,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[Generated]:
        """Sample `n` continuations of a text, messages or ids. Waits for all of them.

        A continuation ends before the first text of `stop`. `tools` default to the task's.
        """

    async def next_ids(self, messages: Sequence[Message], action: Sequence[int]) -> list[int]:
        """Return the ids between an action, given by its ids, and the next one."""

    def conversation(
        self,
        messages: str | Sequence[Message],
        *,
        role: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Conversation:
        """Begin a conversation of an agent."""

    def environment(self, row: Mapping[str, Any] = {}) -> Environment:
        """Return a new session of the task; use it in `async with`.

        `row` is added to the episode's row, for sessions that read more than their task gives.
        """

    async def score(self, messages: Sequence[Message]) -> Outcome:
        """Score a conversation by the task's reward functions."""

    def agent(self) -> Agent:
        """Return an endpoint for an agent that is not written for this service."""

    async def run_program(
        self, command: Sequence[str], *, text: str = "", environ: Mapping[str, str] | None = None
    ) -> Program:
        """Run a program with an input to its end. Cancelled, its whole process group is killed."""


class Workflow:
    """How an episode is played. Subclass it, and name the subclass in `rollouts.workflow`.

    Keyword arguments of the subclass are set by `rollouts.options`. One object plays many episodes
    at once, so `run` keeps what belongs to an episode in local variables.
    """

    resumable: ClassVar[bool] = False
    """Whether `run` may start again on another rollout worker after the death of its own.

    It opens one agent, whose program runs in the session that it opens next and uses nothing else
    of the engine. The agent has all its answers then, the session is as it was, and the first step
    is the last one of the dead worker, under way or ended.
    """

    def check_task(self, task: Task) -> None:
        """Raise UnusableTask for a task that it cannot play; called before a run starts."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        """Play an episode, which has its row; return at least one trajectory.

        The first one stands for the episode in metrics. An exception fails this attempt alone.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no run(self, episode, engine)")


class Conversation:
    """A conversation of one agent, which grows by token ids. Made by `Engine.conversation`."""

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message],
        role: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.messages: list[Message] = [dict(message) for message in messages]
        """All messages so far."""
        self.turns: list[Turn] = []
        """What the agent has written so far."""
        self.role = role
        self._engine, self._tools = engine, tools
        self._ids: list[int] = []
        self._new: list[Message] = []

    def say(self, messages: str | Sequence[Message]) -> None:
        """Add messages that the agent reads before it acts next; a text is one of the user."""
        added = as_messages(messages)
        self.messages += added
        self._new += added

    async def act(
        self, *, greedy: bool = False, trained: bool = True, max_tokens: int | None = None
    ) -> str:
        """Have the agent write its next message; return its text. Waits for the last token.

        With `trained` False the message is context only. Raises ContextFull.
        """
        context = await self._context()
        prompt: Sequence[Message] | Sequence[int]
        prompt = self._ids + context if self.turns else self.messages
        (found,) = await self._engine.generate(
            prompt, greedy=greedy, max_tokens=max_tokens, tools=self._tools
        )
        fresh = found.prompt_ids[len(self._ids) :]
        self.turns.append(_turn(fresh, found.result, trained))
        self._ids = found.prompt_ids + found.result.token_ids
        self.messages.append(assistant_message(found.text, f"call_{len(self.turns) - 1}"))
        self._new = []
        return found.text

    def trajectory(
        self,
        reward: float,
        *,
        success: bool | None = None,
        advantage: float | None = None,
        error_sites: Sequence[ErrorSite] = (),
        rewards: Mapping[str, float] | None = None,
        turn_rewards: Sequence[float] = (),
        turn_advantages: Sequence[float] = (),
        screened: bool = False,
    ) -> Trajectory:
        """Return the conversation with its reward; without `success` a reward of 1 is one.

        `turn_rewards` are parts of `reward`; a number for each message that the agent wrote. Pass
        `outcome.screened` on: nothing of a screened conversation is trained.
        """
        won = reward >= 1 if success is None else success
        return Trajectory(
            list(self.turns),
            list(self.messages),
            reward,
            won,
            self.role,
            advantage,
            error_sites,
            dict(rewards or {}),
            turn_rewards,
            turn_advantages,
            screened,
        )

    async def _context(self) -> list[int]:
        """Return the ids that were added since the last action."""
        if not self.turns:
            return []
        if not self._new:
            raise ValueError("the agent has just acted: say() something before it acts again")
        return await self._engine.next_ids(self._new, self.turns[-1].action_ids)


def as_messages(messages: str | Sequence[Message]) -> list[Message]:
    """Return messages as they are, and a text as one message of the user."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [dict(message) for message in messages]


def _turn(context: list[int], result: GenerationResult, trained: bool) -> Turn:
    ids, logprobs, versions = result.token_ids, result.logprobs, result.versions
    return Turn(context, ids, logprobs, versions, result.stop_reason, trained)


LONGEST_SHOWN = 500


class AgentFailed(TaskError):
    """An agent ended with an error, or without an answer."""


class AgentWorkflow(Workflow):
    """Plays an episode by an agent that asks an OpenAI-compatible endpoint."""

    async def solve(self, messages: list[Message], agent: Agent) -> str:
        """Return the agent's answer to the first messages of an episode."""
        raise NotImplementedError(f"{type(self).__name__} defines no solve(self, messages, agent)")

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        async with engine.environment() as session:
            async with engine.agent() as agent:
                answer = await self._answer(engine, session.messages, agent)
            await session.step(answer)
            outcome = await session.finish()
        return agent.trajectories(outcome.reward, success=outcome.success, rewards=outcome.rewards)

    async def _answer(self, engine: Engine, messages: list[Message], agent: Agent) -> str:
        return await self.solve(messages, agent)


class FunctionAgent(AgentWorkflow):
    """An agent that is a function: `function(messages, base_url, api_key)` returns its answer.

    It may be plain, which runs in a thread, or async.
    """

    def __init__(self, function: str) -> None:
        """`function` is an import path, as "my_module:solve"."""
        try:
            self._function = imported(function)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnusableTask(
                f"function is {function!r}, which cannot be imported ({error}): write "
                "my_module:my_function, in a folder of run.import_paths or installed"
            ) from error

    async def solve(self, messages: list[Message], agent: Agent) -> str:
        found = await TaskCalls(asyncio.to_thread)(
            "the agent's function", self._function, messages, agent.base_url, agent.api_key
        )
        return str(found)


class CommandAgent(AgentWorkflow):
    """An agent that is a program: it reads the first messages as JSON and prints its answer.

    Its environment has OPENAI_BASE_URL and OPENAI_API_KEY. A status other than 0 fails the attempt.
    """

    def __init__(self, command: Sequence[str], timeout_s: float = 600.0) -> None:
        self._command, self._timeout_s = list(command), timeout_s

    async def _answer(self, engine: Engine, messages: list[Message], agent: Agent) -> str:
        text = json.dumps({"messages": messages})
        try:
            async with asyncio.timeout(self._timeout_s):
                done = await engine.run_program(self._command, text=text, environ=agent.environ)
        except TimeoutError:
            raise AgentFailed(
                f"{self._command[0]} did not end within {self._timeout_s:g} s: raise timeout_s in "
                "rollouts.options, or have it end earlier"
            ) from None
        if done.status:
            said = done.errors.strip()[-LONGEST_SHOWN:] or "it said nothing"
            raise AgentFailed(f"{self._command[0]} ended with status {done.status}: {said}")
        return done.output.strip()
