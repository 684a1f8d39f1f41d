"""The environment actor: holds the sessions of running episodes, steps and scores them.

The task's own code runs in a process of this actor's, without models: whatever it does, this actor
still answers.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.actors.rollout_workers.peers import Peer, PeerJudges
from composer_mesh.actors.task_process.process import TaskProcess
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor, end_this_process
from composer_mesh.mesh.call_server import Endpoint, current_caller
from composer_mesh.mesh.call_stream import CallStream
from composer_mesh.mesh.processes import cpu_seconds, resident_bytes
from composer_mesh.mesh.supervision import SessionLost, heard
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, reported_to_loop
from composer_mesh.rollouts.episode import EpisodeRecord
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, Outcome, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import TaskProcessEnded, UnusableTask
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply
from composer_mesh.tasks.task_loop import LoopLost, TooManyBlocked

T = TypeVar("T")


@dataclass(eq=False)
class OpenSession:
    """A session, its caller, and the record from which another caller can continue.

    `step` is the last one and `end` the call that finishes it. `expiry` drops a session whose
    caller is dead; None while it has one.
    """

    process: TaskProcess
    caller: str
    record: EpisodeRecord
    step: asyncio.Task[StepResult] | None = None
    end: asyncio.Task[Outcome] | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def turns(self) -> int:
        """Number of recorded turns, with the one whose step is under way; an agent has many."""
        stepping = self.step is not None and not self.step.done() and not self.record.agent
        return len(self.record.turns) + stepping

    async def result(self, call: asyncio.Task[T]) -> T:
        """Wait for one of its calls. Cancelled, it cancels the call, unless its caller is dead."""
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            if self.expiry is None:
                await cancel_and_wait([call])
            raise
        return call.result()


class UnknownSession(KeyError):
    """No session of this name is open: it was never begun, or it was finished."""


class EnvironmentActor(MeshActor):
    """Many sessions of a task, whose code runs in a `TaskProcess`.

    rollouts -- action text --> EnvironmentActor -- messages, error site, outcome --> rollouts
    EnvironmentActor <-- questions of rewards, answers --> judges

    One call per session at a time, except those that record. A call that blocks the task's event
    loop fails, and so does one that holds or ends the process, which is started again; other
    sessions that are lost with it are played again, through no fault of theirs.

    A session outlives its rollout worker with the record of its episode: another worker adopts it
    within `adoption_s` seconds. A step under way, or the scoring, continues meanwhile.
    """

    kind: ClassVar[str] = "environment"
    adoption_s: ClassVar[float] = 600.0

    def __init__(self) -> None:
        self._sessions: dict[str, OpenSession] = {}
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
    async def begin(self, session_id: str, episode: Episode, agent: bytes = b"") -> list[Message]:
        """Open a session; return the initial messages.

        With the keys of an `agent` its answers are recorded. A session that was adopted continues,
        by the row of this episode.
        """
        if session_id in self._sessions:
            one = self._open(session_id)
            if one.end is None:  # otherwise nothing plays in it any more
                await self._call(one.process, "replace_row", session_id, episode)
            return one.record.messages
        process = await self._running()
        try:
            messages: list[Message] = await self._call(process, "begin", session_id, episode)
        except BaseException:
            self._forget(process, session_id)  # it may have started there
            raise
        record = EpisodeRecord(messages, agent=agent)
        self._sessions[session_id] = OpenSession(process, current_caller.get(), record)
        process.episodes[session_id] = episode
        self._count()
        return messages

    @concurrent_endpoint
    async def adopt(self, session_id: str) -> EpisodeRecord | None:
        """Give a dead caller's session to this one; return its record, None where it is not open.

        Waits for its step under way, and raises the error of that; not where an agent plays.
        """
        one = self._sessions.get(session_id)
        if one is None or one.expiry is None:
            return None
        one.expiry.cancel()
        one.expiry, one.caller = None, current_caller.get()
        if one.step is not None and not one.record.agent:
            await one.result(one.step)
        return one.record

    @concurrent_endpoint
    async def record(self, session_id: str, answer: bytes) -> None:
        """Record a pickled answer to the agent of a session."""
        self._open(session_id).record.turns.append(answer)

    @concurrent_endpoint
    async def sent(self, session_id: str, answer: str, received: bool) -> None:
        """Record whether an agent has received an answer; does nothing after its session."""
        if session_id in self._sessions:
            self._sessions[session_id].record.sent[answer] = received

    @concurrent_endpoint
    async def step(
        self, session_id: str, text: str, turn: bytes = b"", again: bool = False
    ) -> StepResult:
        """Execute an action; record its pickled turn, if it is given.

        `again` returns the result of the last step instead, if there was one. Waits for its end.
        """
        one = self._open(session_id)
        if one.step is None or not again:
            one.step = asyncio.create_task(self._stepped(one, session_id, text, turn))
            one.step.add_done_callback(heard)
        return await one.result(one.step)

    @concurrent_endpoint
    async def finish(self, session_id: str) -> Outcome:
        """Score and close a session, ended or not; return its conversation and its reward."""
        one = self._open(session_id)
        if one.end is None:  # otherwise its last caller died meanwhile
            one.end = asyncio.create_task(self._call(one.process, "finish", session_id))
            one.end.add_done_callback(heard)
        outcome = await one.result(one.end)
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
    async def close_calls(self, caller: str, wanted: Sequence[str] = ()) -> dict[str, int]:
        """Drop the sessions of a caller that is dead, except those `wanted` by another.

        Returns these with their numbers of turns. Waits for the other calls under way.
        """
        expire = asyncio.get_running_loop().call_later
        for name in wanted:
            one = self._sessions.get(name)
            if one is not None and one.caller == caller and one.process.fault is None:
                one.expiry, one.caller = expire(self.adoption_s, self._drop, name), ""
        await self.end_calls(caller)
        for session_id in [name for name, one in self._sessions.items() if one.caller == caller]:
            self._drop(session_id)
        left = {name: one for name, one in self._sessions.items() if one.expiry is not None}
        return {name: left[name].turns for name in wanted if name in left}

    def in_use(self) -> int:
        return len(self._sessions)

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

    def _open(self, session_id: str) -> OpenSession:
        one = self._sessions.get(session_id)
        if one is None:
            raise UnknownSession(f"{session_id} is not open here: begin it first")
        if one.process.fault is not None:
            raise one.process.lost(session_id)
        return one

    async def _stepped(
        self, one: OpenSession, session_id: str, text: str, turn: bytes
    ) -> StepResult:
        result: StepResult = await self._call(one.process, "step", session_id, text)
        if turn:
            one.record.add(turn, result)
        return result

    async def _call(self, process: TaskProcess, endpoint: str, *args: Any) -> Any:
        try:
            return await process.call(endpoint, *args)
        except LoopLost as lost:
            raise SessionLost(str(args[0]), self.kind, str(lost)) from None
        except TooManyBlocked as blocked:
            process.end_for(blocked)
            raise TaskProcessEnded(process.words(endpoint, args), str(blocked)) from blocked

    def _drop(self, session_id: str) -> None:
        one = self._sessions.pop(session_id, None)
        if one is not None:
            for pending in (one.expiry, one.step, one.end):
                if pending is not None:
                    pending.cancel()
            one.process.episodes.pop(session_id, None)
            self._forget(one.process, session_id)
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
        self.activity = f"{len(self._sessions)} sessions" if self._sessions else "idle"
