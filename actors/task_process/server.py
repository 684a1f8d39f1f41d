"""The program of an environment actor's task process: runs the task's code, and answers calls.

The task runs on an event loop and threads of its own, so that this process answers as long as its
interpreter is free. Imports neither Monarch nor torch.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.call_server import Endpoint, PipeCalls
from composer_mesh.mesh.hosts.process_lifetime import end_with_parent
from composer_mesh.mesh.task_resources import attach_sandbox, attach_servers
from composer_mesh.mesh.waiting import BackgroundTasks, reported_to_loop
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, Outcome, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.calls import STACKS_SIGNAL, CallMarks, waits_for_others
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.running import RunningEpisode, score_group
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskRunner

T = TypeVar("T")


class JudgesOfActor:
    """The port `Judges` of a task process: its actor asks."""

    def __init__(self, calls: PipeCalls) -> None:
        self._calls, self._own = calls, asyncio.get_running_loop()

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Return a judge's answer; called on the task's event loop."""
        asking = asyncio.run_coroutine_threadsafe(self._calls.call("ask", question), self._own)
        return await asyncio.wrap_future(asking)


class TaskServer:
    """The endpoints of a task process: its sessions, one call per session at a time."""

    def __init__(self, marks: CallMarks) -> None:
        self._marks, self._sessions = marks, dict[str, RunningEpisode]()
        self._closing = BackgroundTasks(reported_to_loop)
        self.calls: PipeCalls
        """The connection to the actor; set before the first call arrives."""

    def endpoint(self, name: str) -> Endpoint:
        """Return the endpoint of a name."""
        return getattr(self, name)

    async def load(
        self, config: Config, keys: Mapping[str, str], import_paths: Sequence[str]
    ) -> None:
        """Load the task's data; modules are found where the actor finds them."""
        sys.path += [path for path in import_paths if path not in sys.path]
        task: Task = await asyncio.to_thread(make_task, config)
        task.use_judges(JudgesOfActor(self.calls))
        self._runner = TaskRunner(task, config.environment.call_s, self._marks)
        await asyncio.to_thread(attach_sandbox, config, task)
        given = {**os.environ, **keys}
        await asyncio.to_thread(attach_servers, config, task, given)  # it imports the SDK

    async def ping(self) -> None:
        """Answer, which shows that the interpreter is free."""

    async def waits(self) -> bool:
        """Return whether a call of the task waits for another service, such as a container."""
        return waits_for_others()

    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        """Return an episode with its row, and its verified answer if the task states one."""
        return await self._runner.run(self._prepared(episode))

    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        """Score a conversation that was had without a session."""
        return await self._runner.run(self._scored(episode, messages))

    async def score_group(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together, by the group rewards of its task."""
        return await self._runner.run(self._group_scored(episode, group))

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a new session; return the initial messages."""
        session, messages = await self._runner.run(self._runner.begin_episode(episode))
        self._sessions[session_id] = session
        return messages

    async def replace_row(self, session_id: str, episode: Episode) -> None:
        """Give a session the row of its episode on another rollout worker, during a call too."""
        self._sessions[session_id].replace_row(episode)

    async def step(self, session_id: str, text: str) -> StepResult:
        """Execute an action."""
        return await self._runner.run(self._sessions[session_id].step(text))

    async def finish(self, session_id: str) -> Outcome:
        """Score and close a session."""
        outcome = await self._runner.run(self._sessions[session_id].outcome())
        await self.forget(session_id)
        return outcome

    async def forget(self, session_id: str) -> None:
        """Drop a session; does nothing if it is not open."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            closing = self._runner.run(session.close())
            self._closing.start(f"closing {session_id}", closing)

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


async def serve(connection: socket.socket, marks: CallMarks) -> None:
    """Answer the actor's calls until it ends."""
    server, ended = TaskServer(marks), asyncio.Event()
    server.calls = PipeCalls(connection, server.endpoint, ended.set, _end)
    await server.calls.open()
    await ended.wait()


def _end(error: BaseException) -> None:
    sys.stderr.write(f"composer-mesh: a task process cannot answer: {error!r}\n")
    os._exit(1)


def main(connection: int, marks: int, stacks: int) -> None:
    """Serve on inherited descriptors: a socket, and the files for marks and stacks."""
    end_with_parent()
    for descriptor in (connection, marks, stacks):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    asyncio.run(serve(socket.socket(fileno=connection), CallMarks(marks)))
    os._exit(0)  # a function of the task that never returns would hold up the end


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
