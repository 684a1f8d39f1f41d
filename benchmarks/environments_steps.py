"""Time of a step by the OpenEnv client, beside that of a bare socket: used by `environments.py`.

Both exchange the same frames with one echo server in a process of its own. It does nothing but
parse a frame and answer it, so that no time of a server hides what the client adds.

    python benchmarks/environments_steps.py PORT     serves the echo
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from composer_mesh.plugins.openenv.client.task import OpenEnvTask, limits_of, only_text_field
from composer_mesh.plugins.openenv.client.wire import HEALTH_PATH, SESSION_PATH
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.session import Reply
from composer_mesh.tasks.task import TaskSettings

ACTION = {"message": "x"}
BLOCK = 50
"""Steps of one side before the other has its turn."""

ACTION_SCHEMA = {
    "type": "object",
    "properties": {"message": {"type": "string"}},
    "required": ["message"],
}

Step = Callable[[], Awaitable[None]]


async def compared(port: int, steps: int) -> dict[str, float]:
    """Return the median microseconds of a step of both; they take turns in blocks."""
    task = EchoTask.create(TaskSettings(max_turns=10**9), url=f"http://127.0.0.1:{port}")
    session = task.session(Episode(task.name, "train", 0, {"seed": 1}))
    await session.start()
    socket = await opened(port)

    async def by_client() -> None:
        reply = await session.reply(ACTION["message"])
        assert isinstance(reply, Reply)
        assert reply.messages[0]["content"] == ACTION["message"]

    async def by_socket() -> None:
        data = await exchanged(socket, {"type": "step", "data": ACTION})
        assert data["observation"]["echoed"] == ACTION["message"]

    sides: dict[str, Step] = {"client": by_client, "socket": by_socket}
    times: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for at in range(-1, steps // BLOCK):
            for name, step in sides.items():
                found = [await seconds(step) for _ in range(BLOCK)]
                times[name] += found if at >= 0 else []
    finally:
        await socket.close()
        await session.close()
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


async def opened(port: int) -> ClientConnection:
    """Return a bare socket with the client's settings, after its reset."""
    address = f"ws://127.0.0.1:{port}{SESSION_PATH}"
    socket = await connect(address, proxy=None, compression=None, ping_interval=None, max_queue=1)
    await exchanged(socket, {"type": "reset", "data": {}})
    return socket


async def exchanged(socket: ClientConnection, frame: dict[str, Any]) -> Any:
    """Send a frame; return the data of its answer."""
    await socket.send(json.dumps(frame))
    return json.loads(await socket.recv())["data"]


async def seconds(step: Step) -> float:
    began = time.perf_counter()
    await step()
    return time.perf_counter() - began


class EchoTask(OpenEnvTask):
    """The client's task without questions by HTTP, which the echo server does not answer."""

    def load(self) -> None:
        self.headers, self.kind = {}, "text"
        self.limits = limits_of(self.options, self.settings.call_s)
        self.text_field = only_text_field(ACTION_SCHEMA)


async def echo(socket: ServerConnection) -> None:
    """Answer the frames of one session."""
    turn = 0
    async for text in socket:
        frame = json.loads(text)
        if frame["type"] == "close":
            return
        turn += frame["type"] == "step"
        await socket.send(json.dumps(answer(frame, turn)))


def answer(frame: dict[str, Any], turn: int) -> dict[str, Any]:
    """Return the answer to a reset, a step or a question for the state."""
    if frame["type"] == "state":
        return {"type": "state", "data": {"episode_id": "echo", "step_count": turn}}
    metadata = {"turn": turn, "error_kind": "none"}
    said = {"echoed": frame["data"].get("message", "ready"), "metadata": metadata}
    data = {"observation": said, "reward": None, "done": False, "metadata": metadata}
    return {"type": "observation", "data": data}


def health(socket: ServerConnection, request: Request) -> Response | None:
    """Answer the question whether the server has started."""
    return socket.respond(HTTPStatus.OK, "healthy") if request.path == HEALTH_PATH else None


async def served(port: int) -> None:
    async with serve(
        echo, "127.0.0.1", port, process_request=health, compression=None, ping_interval=None
    ) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(served(int(sys.argv[1])))
