"""A task with tools that fail in each way, and how tests serve it."""

import asyncio
import json
import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.openenv.server.command import ServeOptions, WorkerStart
from composer_mesh.plugins.openenv.server.late_rewards import RewardFile
from composer_mesh.plugins.openenv.server.mcp import Forwarding, McpSessions
from composer_mesh.plugins.openenv.server.session import SessionCounts, SessionPool
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.services.web.http_server import listening_socket
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskRunner
from composer_mesh.tasks.tool import tool

SECRET = "the answer is 4217"
SYSTEM = {"role": "system", "content": "Count."}


class Counting(Session):
    """Counts; `closed` are the indices of the episodes that were closed."""

    closed: ClassVar[list[int]] = []
    never: ClassVar[threading.Event] = threading.Event()

    def start(self) -> None:
        self.count = 0

    def close(self) -> None:
        self.closed.append(self.episode.index)

    @tool
    async def add(self, by: int) -> str:
        """Adds to the count.

        Args:
            by: How much.
        """
        if by < 0:
            raise ToolError("negative", "by is negative", {"by": str(by)}, hint="negative")
        self.count += by
        return f"count {self.count}"

    @tool
    def stop(self) -> str:
        """Ends the episode."""
        self.end()
        return "bye"

    @tool
    def fail(self) -> str:
        """Fails, with a text that no client may read."""
        raise KeyError(SECRET)

    @tool
    def hang(self) -> str:
        """Waits until its test is over."""
        self.never.wait()
        return ""


class Count(Task):
    """Count to a goal."""

    session_class = Counting
    hint_templates: ClassVar[dict[str, str]] = {"negative": "Add no {by}."}

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"goal": rng.randint(1, 10**6), "secret": SECRET}

    def prompt(self, row: Any) -> list[dict[str, Any]]:
        return [SYSTEM, {"role": "user", "content": f"Count to {row['goal'] % 7}."}]

    def verified_answer(self, episode: Episode) -> str:
        return SECRET

    @reward
    def counted(self, transcript: Transcript) -> float:
        assert isinstance(transcript.session, Counting)
        return float(transcript.session.count)


class CountRows(Count):
    """Count in rows."""

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{"goal": index, "secret": SECRET} for index in range(3)]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """The action that calls a tool."""
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def pool_of(
    folder: Path, task: Task | None = None, most: int = 8, limit_s: float = 30.0, idle_s: float = 60
) -> SessionPool:
    """A pool of sessions of one process."""
    counts = SessionCounts(folder / "sessions", 1, 0, most)
    return SessionPool(TaskRunner(task or Count.create(), limit_s), counts, idle_s)


def served(folder: Path, pool: SessionPool) -> Any:
    """What the routes answer from."""
    from composer_mesh.plugins.openenv.server.app import ServedEnvironments

    rewards = RewardFile(folder / "rewards.sqlite")
    return ServedEnvironments(pool, McpSessions(pool, 0), rewards, Forwarding(folder, 1, 0))


def worker_start(folder: Path, config: Config, number: int = 0, **options: Any) -> WorkerStart:
    """The start of a server process on a free port."""
    chosen = ServeOptions(**{"port": 0, **options})
    return WorkerStart(options=chosen, config=config, folder=str(folder), number=number)


class ScriptedSocket:
    """A client that sends frames, each when the one before was answered."""

    def __init__(self, *frames: Any, stays: bool = False) -> None:
        self._frames = [one if isinstance(one, str) else json.dumps(one) for one in frames]
        self._stays = stays
        self.answers: list[dict[str, Any]] = []
        self.closed = False
        self.waiting = asyncio.Event()
        self.sending: Callable[[], Any] | None = None

    async def receive(self) -> str | None:
        if self._frames:
            return self._frames.pop(0)
        self.waiting.set()
        if self._stays:
            await asyncio.Event().wait()
        return None

    async def send(self, text: str) -> None:
        if self.sending is not None:
            await self.sending()
        self.answers.append(json.loads(text))

    async def close(self) -> None:
        self.closed = True


@contextmanager
def served_beside(folder: Path, config: Config, **options: Any) -> Iterator[str]:
    """Serve a config's task on a thread; yields the URL."""
    from composer_mesh.plugins.openenv.server.worker import Worker

    ports, ended = queue.Queue[int](), threading.Event()

    async def serve() -> None:
        listener = listening_socket("127.0.0.1", 0)
        async with Worker(worker_start(folder, config, **options)).serving(listener) as port:
            ports.put(port)
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=120)}"
    finally:
        ended.set()
        thread.join()
