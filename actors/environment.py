"""The environment actor: holds the sessions of running episodes, steps and scores them.

The task's own code runs here, in a process without models, on an event loop and threads of its own:
whatever it does, this actor goes on answering.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.mcp_servers.servers import attached
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.actors.rollout_workers.judge_calls import PeerJudges
from composer_mesh.actors.rollout_workers.peers import Peer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor, end_this_process
from composer_mesh.mesh.background import BackgroundTasks, told_to_loop
from composer_mesh.mesh.call_server import current_caller
from composer_mesh.mesh.call_stream import CallStream
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.mesh.task_sandboxes import attach_sandbox
from composer_mesh.rollouts.group_rewards import FinishedRollout, GroupScore
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.group_scoring import score_group
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import LoopLost, TooManyBlocked
from composer_mesh.tasks.task_runner import TaskRunner

T = TypeVar("T")


class UnknownSession(KeyError):
    """No session of this name is open: it was never begun, or it was finished."""


class EnvironmentActor(MeshActor):
    """One process with many sessions.

    rollouts -- action text --> EnvironmentActor -- messages, error site, outcome --> rollouts
    EnvironmentActor <-- questions of rewards, answers --> judges

    One call per session at a time. A call that blocks the task's event loop fails; the sessions
    that were in a call beside it are lost, and played again elsewhere.
    """

    kind: ClassVar[str] = "environment"

    def __init__(self) -> None:
        self._sessions: dict[str, RunningEpisode] = {}
        self._callers: dict[str, str] = {}
        self._judges: PeerJudges | None = None
        self._closing = BackgroundTasks(told_to_loop)

    @concurrent_endpoint
    async def load(self, config: Config, keys: Keys | None = None) -> None:
        """Load the task's data. `keys` are the variables of the MCP servers of the config."""
        task: Task = await asyncio.to_thread(make_task, config)
        self._runner = TaskRunner(task, config.environment.call_s)
        await asyncio.to_thread(attach_sandbox, config, task)
        given = {**os.environ, **(keys or {})}
        await asyncio.to_thread(attached, config, task, given)  # it imports the SDK
        self._judge_s = config.judges.timeout_s + config.run.deadline_s

    @concurrent_endpoint
    async def connect_judges(
        self, name: str, judges: tuple[Peer, ...], gone: Mapping[str, str]
    ) -> None:
        """Ask these judge actors from now on; `name` is this actor's own."""
        if self._judges is None:
            open_stream = partial(CallStream, name, failed=end_this_process)
            self._judges = PeerJudges(open_stream, self._judge_s)
            self._runner.task.use_judges(self._judges)
        self._judges.connect(judges, gone)

    @concurrent_endpoint
    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        """Return an episode with its row, and its verified answer if the task states one."""
        return await self._run(self._prepared(episode))

    @concurrent_endpoint
    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        """Score a conversation that was had without a session."""
        return await self._run(self._scored(episode, messages))

    @concurrent_endpoint
    async def score_group(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together, by the group rewards of its task."""
        return await self._run(self._group_scored(episode, group))

    @concurrent_endpoint
    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a new session; return the initial messages."""
        session, messages = await self._run(self._runner.begin_episode(episode), session_id)
        self._sessions[session_id] = session
        self._callers[session_id] = current_caller.get()
        self._count()
        return messages

    @concurrent_endpoint
    async def step(self, session_id: str, text: str) -> StepResult:
        """Execute an action."""
        return await self._run(self._session(session_id).step(text), session_id)

    @concurrent_endpoint
    async def state(self, session_id: str, turn: int) -> list[Message]:
        """Return exactly the messages that the agent saw when it acted at `turn`."""
        return self._session(session_id).state(turn)

    @concurrent_endpoint
    async def finish(self, session_id: str) -> Outcome:
        """Score and close a session, ended or not; return its conversation and its reward."""
        outcome = await self._run(self._session(session_id).outcome(), session_id)
        self._drop(session_id)
        return outcome

    @concurrent_endpoint
    async def forget(self, session_id: str) -> None:
        """Drop an abandoned session; does nothing if it is not open."""
        self._drop(session_id)

    @concurrent_endpoint
    async def hang_up(self, caller: str) -> None:
        """Drop the sessions of a caller that is dead. Waits for its calls under way."""
        await self.end_calls(caller)
        for session_id in [name for name, one in self._callers.items() if one == caller]:
            self._drop(session_id)

    def in_use(self) -> int:
        return len(self._sessions)

    async def _prepared(self, episode: Episode) -> tuple[Episode, str | None]:
        whole = await self._runner.with_row(episode)
        stated = self._runner.task.verified_answer
        return whole, await self._runner.calls("verified_answer", stated, whole)

    async def _scored(self, episode: Episode, messages: list[Message]) -> Outcome:
        whole = await self._runner.with_row(episode)
        scored = RunningEpisode(self._runner.task, whole, self._runner.calls)
        return await scored.outcome(messages)  # its session was never started

    async def _group_scored(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        runner = self._runner
        return await score_group(runner.task, await runner.with_row(episode), group, runner.calls)

    async def _run(self, work: Coroutine[Any, Any, T], session_id: str = "") -> T:
        try:
            return await self._runner.run(work)
        except LoopLost as lost:
            raise SessionLost(session_id, self.kind, str(lost)) from None
        except TooManyBlocked as blocked:
            end_this_process(blocked)
            raise

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        self._callers.pop(session_id, None)
        if session is not None:
            self._closing.start(f"closing {session_id}", self._run(session.close()))
        self._count()

    def _session(self, session_id: str) -> RunningEpisode:
        if session_id not in self._sessions:
            raise UnknownSession(f"{session_id} is not open here: begin it first")
        return self._sessions[session_id]

    def _count(self) -> None:
        self.activity = f"{len(self._sessions)} sessions" if self._sessions else "idle"
