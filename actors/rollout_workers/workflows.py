"""Plays episodes by a user's workflow, which runs on an event loop of its own.

WorkflowPlayer -- episode, engine --> the workflow's run(), on its loop
engine -- prompts, actions --> this worker's loop --> generators, environments
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint, CapturedAgent, There
from composer_mesh.actors.rollout_workers.agent_episode import AnswerLog
from composer_mesh.mesh.actor import end_this_process
from composer_mesh.mesh.programs import TiedProgram
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.rollouts.chat import ChatFormat, encoded
from composer_mesh.rollouts.episode import Environments, Generation, Played, Sample, seed_of
from composer_mesh.rollouts.generation import (
    GenerationRequest,
    GenerationResult,
    cut_at,
    tokens_of,
)
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.task_loop import LoopLost, TaskLoop, TooManyBlocked
from composer_mesh.tasks.workflow import (
    ContextFull,
    Conversation,
    Generated,
    Program,
    Trajectory,
    Workflow,
    as_messages,
)

T = TypeVar("T")
BLOCKED_S = 30.0
"""Seconds after which a workflow that blocks its event loop has failed."""


class ScoringEnvironments(Environments, Protocol):
    """Environments that also make rows, score conversations without a session, and record answers.

    A session that is begun with the keys of an `agent` keeps what is recorded of its answers. After
    it was adopted, `begin` continues it by another row.
    """

    async def begin(
        self, session_id: str, episode: Episode, agent: bytes = b""
    ) -> list[Message]: ...

    async def step(
        self, session_id: str, text: str, turn: Turn | None = None, again: bool = False
    ) -> StepResult: ...

    async def record(self, session_id: str, answer: bytes) -> None: ...

    def sent(self, session_id: str, answer: str, received: bool) -> None: ...

    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]: ...

    async def score(self, episode: Episode, messages: list[Message]) -> Outcome: ...


class WorkflowPlayer:
    """Plays samples by one workflow; each may take `limit_s` seconds."""

    def __init__(
        self,
        workflow: Workflow,
        generation: Generation,
        environments: ScoringEnvironments,
        chat: ChatFormat,
        limit_s: float,
    ) -> None:
        self._workflow, self._loop = workflow, TaskLoop()
        self._calls = TaskCalls(self._loop.in_a_thread, limit_s)
        self._agents = AgentEndpoint(generation, chat, len(chat.tokenizer))
        self._ports = generation, environments, chat, self._agents

    async def close(self) -> None:
        """Close the endpoint of agents, if any was opened."""
        await self._agents.close()

    async def play(self, sample: Sample, session: str, home: str = "") -> Played:
        """Play one attempt at a sample. Waits for the workflow; cancelled, it is cancelled too.

        A resumable workflow continues in a session that another worker has left at its `home`.
        """
        _, environments, _, _ = self._ports
        log = None
        if self._workflow.resumable:
            keep, sent = partial(environments.record, session), partial(environments.sent, session)
            log = AnswerLog(keep, sent)
        episode, answer = await environments.prepare(sample.episode)
        engine = EpisodeEngine(sample, episode, session, *self._ports, log)
        what = f"workflow {type(self._workflow).__name__}"
        try:
            if home:
                await engine.adopt(home)
            running = self._calls(what, self._workflow.run, episode, engine)
            found = await self._loop.run(running, BLOCKED_S)
        except LoopLost as lost:
            raise SessionLost(session, "rollouts", str(lost)) from None
        except TooManyBlocked as blocked:
            end_this_process(blocked)
            raise
        finally:
            engine.close()
        trace = trace_of(replace(sample, episode=episode), found, answer, what)
        tokens = engine.tokens
        return Played(trace, tokens["prompt"], tokens["cached"], tokens["sampled"])


class EpisodeEngine:
    """The engine of one episode; its methods are called on the workflow's event loop."""

    def __init__(
        self,
        sample: Sample,
        episode: Episode,
        session: str,
        generation: Generation,
        environments: ScoringEnvironments,
        chat: ChatFormat,
        agents: AgentEndpoint,
        log: AnswerLog | None = None,
    ) -> None:
        """Requests are made on the event loop that is running now.

        With a `log` the workflow is resumable: its one agent is recorded with its one environment.
        """
        self._own = asyncio.get_running_loop()
        self._sample, self._episode, self._session = sample, episode, session
        self._generation, self._environments, self._chat = generation, environments, chat
        self._agents, self._log = agents, log
        self._requests, self._sessions = count(), count()
        self._open: set[str] = set()
        self._chats: dict[str, ChatFormat] = {}
        self._opened: list[CapturedAgent] = []
        self._tokens = Counter[str]()

    @property
    def tools(self) -> list[dict[str, Any]]:
        return list(self._chat.tools)

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
        return await self._there(self._generate(prompt, n, greedy, max_tokens, stop, tools))

    async def next_ids(self, messages: Sequence[Message], action: Sequence[int]) -> list[int]:
        async def continued() -> list[int]:
            return await encoded(messages, partial(self._chat.continuation, list(messages), action))

        return await self._there(continued())

    def conversation(
        self,
        messages: str | Sequence[Message],
        *,
        role: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Conversation:
        return Conversation(self, as_messages(messages), role, tools)

    def environment(self, row: Mapping[str, Any] = {}) -> EngineEnvironment:
        number, session = next(self._sessions), self._session
        self._refuse_second("environment", number)
        if self._log is None:  # nobody adopts a session with a number
            session = f"{session}/{number}"
        episode = replace(self._episode, payload={**self._episode.payload, **row})
        ports = self._environments, episode, session, self._there, self._open
        return EngineEnvironment(*ports, self._log)

    async def adopt(self, home: str) -> None:
        """Continue in the session that a dead worker has left, if it is still open."""
        assert self._log is not None, "sessions of other workflows are not left"
        self._open.add(self._session)
        self._log.record = await self._environments.adopt(self._session, home)

    async def score(self, messages: Sequence[Message]) -> Outcome:
        return await self._there(self._environments.score(self._episode, list(messages)))

    def agent(self) -> CapturedAgent:
        self._refuse_second("agent", len(self._opened))
        self._opened.append(CapturedAgent(self._agents, self._sample, self._there, self._log))
        return self._opened[-1]

    @property
    def tokens(self) -> Counter[str]:
        """Tokens of the answers so far, to the workflow and its agents, by kind.

        The kinds are "prompt", "cached" and "sampled".
        """
        return sum((agent.tokens for agent in self._opened), self._tokens)

    async def run_program(
        self, command: Sequence[str], *, text: str = "", environ: Mapping[str, str] | None = None
    ) -> Program:
        program = await asyncio.to_thread(
            TiedProgram, command, {**os.environ, **(environ or {})}, Path.cwd()
        )
        finishing = asyncio.ensure_future(asyncio.to_thread(program.finish, text))
        try:
            done = await asyncio.shield(finishing)
        finally:
            program.close()
            await asyncio.wait([finishing])
        return Program(done.status, done.stdout, done.stderr)

    def close(self) -> None:
        """Abandon the sessions that were not finished; call it on the worker's loop."""
        for session in self._open:
            self._environments.abandon(session)

    def _refuse_second(self, what: str, opened: int) -> None:
        if self._log is not None and opened:
            raise UnusableTask(
                f"a resumable workflow opens a second {what}: use one, or set resumable = False"
            )

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's loop. Waits for it; cancelled, it is cancelled there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._own))

    async def _generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        n: int,
        greedy: bool,
        max_tokens: int | None,
        stop: Sequence[str],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[Generated]:
        ids = await self._prompt_ids(prompt, tools)
        sampling = self._sample.sampling
        remaining = sampling.max_context - len(ids)
        if remaining <= 0:
            raise ContextFull(
                f"a prompt of {len(ids)} tokens leaves no place in a context of "
                f"{sampling.max_context}: end the conversation, or raise policy.max_context"
            )
        longest = min(remaining, sampling.max_new_tokens, max_tokens or sampling.max_new_tokens)
        requests = [self._request(ids, longest, greedy) for _ in range(n)]
        group = self._sample.group
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._generation.generate(request, group)) for request in requests
            ]
        chat = self._chat_with(tools)
        return [self._generated(chat, ids, task.result(), stop) for task in running]

    def _generated(
        self, chat: ChatFormat, ids: list[int], result: GenerationResult, stop: Sequence[str]
    ) -> Generated:
        self._tokens += tokens_of(len(ids), result)
        result = cut_at(stop, result, chat.raw_text)
        return Generated(chat.action_text(result.token_ids), ids, result)

    async def _prompt_ids(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int]:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
            return list(cast(Sequence[int], prompt))
        messages = as_messages(cast("str | Sequence[Message]", prompt))
        return await encoded(messages, partial(self._chat_with(tools).first_prompt, messages))

    def _chat_with(self, tools: Sequence[dict[str, Any]] | None) -> ChatFormat:
        if tools is None:
            return self._chat
        key = json.dumps(list(tools))
        if key not in self._chats:
            self._chats[key] = replace(self._chat, tools=list(tools))
        return self._chats[key]

    def _request(self, ids: list[int], longest: int, greedy: bool) -> GenerationRequest:
        sampling = self._sample.sampling
        request_id = f"{self._sample.trace_id}-{next(self._requests):02d}"
        return GenerationRequest(
            request_id,
            ids,
            longest,
            0.0 if greedy else sampling.temperature,
            seed_of(sampling.seed, request_id),
            list(self._chat.stop_ids),
            sampling.deadline_s,
            sampling.truncation,
        )


class EngineEnvironment:
    """A session of the episode's task, opened by `async with`."""

    def __init__(
        self,
        environments: ScoringEnvironments,
        episode: Episode,
        session: str,
        there: There,
        unfinished: set[str],
        log: AnswerLog | None = None,
    ) -> None:
        """`unfinished` holds the sessions of the episode that are open.

        With a `log` an agent that is open already plays in it.
        """
        self._environments, self._episode, self._session = environments, episode, session
        self._there, self._unfinished = there, unfinished
        self._log = log
        self._continues = log is not None and log.record is not None
        """Whether the last action of a dead worker is the next one."""
        self.messages: list[Message] = []
        """The first messages of the session."""

    async def step(self, text: str) -> StepResult:
        """Apply an action."""
        again, self._continues = self._continues, False
        return await self._there(self._environments.step(self._session, text, again=again))

    async def finish(self) -> Outcome:
        """Score and close the session."""
        outcome: Outcome = await self._there(self._environments.finish(self._session))
        self._unfinished.discard(self._session)
        return outcome

    async def __aenter__(self) -> Self:
        agent = b"" if self._log is None else self._log.agent
        if self._log is not None and not agent:
            raise UnusableTask(
                "a resumable workflow opens its environment before its agent: use `async with "
                "engine.agent() as agent, engine.environment() as session`"
            )
        self._unfinished.add(self._session)
        beginning = self._environments.begin(self._session, self._episode, agent)
        self.messages = await self._there(beginning)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: a session that was not finished is abandoned with the episode."""


def trace_of(sample: Sample, found: Any, answer: str | None, what: str) -> Trace:
    """Return the trace of a workflow's trajectories; raise UnusableTask for anything else."""
    every = [found] if isinstance(found, Trajectory) else found
    if not isinstance(every, Sequence) or not every:
        raise UnusableTask(f"{what} returned {str(found)[:40]!r}: return at least one Trajectory")
    for one in every:
        _check(one, what)
    first, *others = [_trace(sample, one, number, answer) for number, one in enumerate(every)]
    return replace(first, others=others)


def _check(one: Any, what: str) -> None:
    if not isinstance(one, Trajectory):
        raise UnusableTask(f"{what} returned a {type(one).__name__}: return Trajectory objects")
    numbers: list[tuple[str, Any]] = [("reward", one.reward), *one.rewards.items()]
    if one.advantage is not None:
        numbers.append(("advantage", one.advantage))
    for kind in ("turn_rewards", "turn_advantages"):
        numbers += [(kind, value) for value in _by_turn(one, kind, what)]
    for name, value in numbers:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UnusableTask(
                f"{what} returned the {name} {value!r} for {one.role or 'a trajectory'}: give a "
                "finite number"
            )


def _by_turn(one: Trajectory, kind: str, what: str) -> list[Any]:
    """Return a trajectory's numbers by turn; raise UnusableTask unless each turn has one."""
    values = list(getattr(one, kind))
    if values and len(values) != len(one.turns):
        raise UnusableTask(
            f"{what} returned {len(values)} {kind} for {len(one.turns)} turns of "
            f"{one.role or 'a trajectory'}: give one number for each, or none"
        )
    return values


def _trace(sample: Sample, one: Trajectory, number: int, answer: str | None) -> Trace:
    episode = sample.episode
    return Trace(
        sample.trace_id if number == 0 else f"{sample.trace_id}.{number}",
        sample.group_id,
        sample.sample,
        episode.task,
        episode.split,
        episode.index,
        list(one.turns),
        list(one.messages),
        float(one.reward),
        one.success,
        list(one.error_sites),
        dict(one.rewards),
        answer,
        role=one.role,
        advantage=0.0 if one.screened else one.advantage,
        turn_rewards=[float(value) for value in one.turn_rewards],
        turn_advantages=[] if one.screened else [float(value) for value in one.turn_advantages],
        screened=one.screened,
    )
