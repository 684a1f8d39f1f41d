"""The environment actor: holds the sessions of running episodes, steps and scores them.

The task's own code runs in a process of this actor's, without models: whatever it does, this actor
still answers.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.actors.rollout_workers.peers import Peer, PeerJudges
from composer_mesh.actors.task_process.process import TaskProcess
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor, end_this_process
from composer_mesh.mesh.call_server import Endpoint, current_caller
from composer_mesh.mesh.call_stream import CallStream
from composer_mesh.mesh.processes import cpu_seconds, resident_bytes
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.mesh.waiting import BackgroundTasks, reported_to_loop
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, Outcome, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import TaskProcessEnded, UnusableTask
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply
from composer_mesh.tasks.task_loop import LoopLost, TooManyBlocked


class UnknownSession(KeyError):
    """No session of this name is open: it was never begun, or it was finished."""


class EnvironmentActor(MeshActor):
    """Many sessions of a task, whose code runs in a `TaskProcess`.

    rollouts -- action text --> EnvironmentActor -- messages, error site, outcome --> rollouts
    EnvironmentActor <-- questions of rewards, answers --> judges

    One call per session at a time. A call that blocks the task's event loop fails, and so does one
    that holds or ends the process, which is started again; other sessions that are lost with it are
    played again, through no fault of theirs.
    """

    kind: ClassVar[str] = "environment"

    def __init__(self) -> None:
        self._callers: dict[str, str] = {}
        self._homes: dict[str, TaskProcess] = {}
        self._process: TaskProcess | None = None
        self._starting = asyncio.Lock()
        self._judges: PeerJudges | None = None
        self._forgetting = BackgroundTasks(reported_to_loop)

    @concurrent_endpoint
    async def load(self, config: Config, keys: Keys | None = None) -> None:
        """Load the task's data. `keys` are the variables of the MCP servers of the config."""
        self._load = config, dict(keys or {}), list(sys.path)
        self._limits = config.environment.hang_s, config.supervision.hang_s
        self._judge_s = config.judges.timeout_s + config.run.deadline_s
        await self._running()

    @concurrent_endpoint
    async def connect_judges(
        self, name: str, judges: tuple[Peer, ...], gone: Mapping[str, str]
    ) -> None:
        """Ask these judge actors from now on; `name` is this actor's own."""
        if self._judges is None:
            open_stream = partial(CallStream, name, failed=end_this_process)
            self._judges = PeerJudges(open_stream, self._judge_s)
        self._judges.connect(judges, gone)

    @concurrent_endpoint
    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        """Return an episode with its row, and its verified answer if the task states one."""
        return await self._anywhere("prepare", episode)

    @concurrent_endpoint
    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        """Score a conversation that was had without a session."""
        return await self._anywhere("score", episode, messages)

    @concurrent_endpoint
    async def score_group(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together, by the group rewards of its task."""
        return await self._anywhere("score_group", episode, group)

    @concurrent_endpoint
    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a new session; return the initial messages."""
        process = await self._running()
        try:
            messages: list[Message] = await self._call(process, "begin", session_id, episode)
        except BaseException:
            self._forget(process, session_id)  # it may have started there
            raise
        self._homes[session_id], process.episodes[session_id] = process, episode
        self._callers[session_id] = current_caller.get()
        self._count()
        return messages

    @concurrent_endpoint
    async def step(self, session_id: str, text: str) -> StepResult:
        """Execute an action."""
        return await self._in_session("step", session_id, text)

    @concurrent_endpoint
    async def finish(self, session_id: str) -> Outcome:
        """Score and close a session, ended or not; return its conversation and its reward."""
        outcome: Outcome = await self._in_session("finish", session_id)
        self._drop(session_id)
        return outcome

    @concurrent_endpoint
    async def forget(self, session_id: str) -> None:
        """Drop an abandoned session; does nothing if it is not open."""
        self._drop(session_id)

    @concurrent_endpoint
    async def waits(self) -> bool:
        """Return whether a call here waits for another service, so that it is late and not hung."""
        process = self._process
        if process is None or process.fault is not None:
            return False
        try:
            return bool(await process.call("waits"))
        except (SessionLost, TaskProcessEnded):
            return False

    @concurrent_endpoint
    async def close_calls(self, caller: str) -> None:
        """Drop the sessions of a caller that is dead. Waits for its calls under way."""
        await self.end_calls(caller)
        for session_id in [name for name, one in self._callers.items() if one == caller]:
            self._drop(session_id)

    def in_use(self) -> int:
        return len(self._homes)

    def details(self) -> dict[str, Any]:
        """Add the memory and CPU time of the task process to those of this one."""
        if self._process is None:
            return {}
        pid = self._process.pid
        return {
            "task_process": pid,
            "rss_bytes": (resident_bytes(os.getpid()) or 0) + (resident_bytes(pid) or 0),
            "cpu_seconds": time.process_time() + (cpu_seconds(pid) or 0.0),
        }

    async def __cleanup__(self, _: Exception | None) -> None:
        if self._process is not None:
            await self._process.close()
        await self._forgetting.close()

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Ask a judge for a reward; the task process calls this."""
        if self._judges is None:
            raise UnusableTask(f"judge {question.judge!r} is queried before judges are connected")
        return await self._judges.ask(question)

    async def _running(self) -> TaskProcess:
        """Return the process that runs the task. Waits for its start, after the end of another."""
        async with self._starting:
            if self._process is None or self._process.fault is not None:
                process = TaskProcess(self._served, *self._limits)
                await process.start(*self._load)
                self._process = process
            return self._process

    def _served(self, name: str) -> Endpoint:
        return {"ask": self.ask}[name]

    async def _anywhere(self, endpoint: str, *args: Any) -> Any:
        return await self._call(await self._running(), endpoint, *args)

    async def _in_session(self, endpoint: str, session_id: str, *args: Any) -> Any:
        process = self._homes.get(session_id)
        if process is None:
            raise UnknownSession(f"{session_id} is not open here: begin it first")
        if process.fault is not None:
            raise process.lost(session_id)
        return await self._call(process, endpoint, session_id, *args)

    async def _call(self, process: TaskProcess, endpoint: str, *args: Any) -> Any:
        try:
            return await process.call(endpoint, *args)
        except LoopLost as lost:
            raise SessionLost(str(args[0]), self.kind, str(lost)) from None
        except TooManyBlocked as blocked:
            process.end_for(blocked)
            raise TaskProcessEnded(process.words(endpoint, args), str(blocked)) from blocked

    def _drop(self, session_id: str) -> None:
        process = self._homes.pop(session_id, None)
        self._callers.pop(session_id, None)
        if process is not None:
            process.episodes.pop(session_id, None)
            self._forget(process, session_id)
        self._count()

    def _forget(self, process: TaskProcess, session_id: str) -> None:
        if process.fault is None:
            forgetting = self._forgotten(process, session_id)
            self._forgetting.start(f"closing {session_id}", forgetting)

    async def _forgotten(self, process: TaskProcess, session_id: str) -> None:
        try:
            await process.call("forget", session_id)
        except (SessionLost, TaskProcessEnded):
            return  # the process has ended, and its sessions with it

    def _count(self) -> None:
        self.activity = f"{len(self._homes)} sessions" if self._homes else "idle"
