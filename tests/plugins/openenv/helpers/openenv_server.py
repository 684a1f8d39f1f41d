"""A small OpenEnv server in this process, with its own thread, that can misbehave anywhere.

Its environment counts: `add` adds a number, `finish` ends with reward 1 at the goal, else 0. It
speaks the wire that was recorded from OpenEnv 0.10. `hooks` replace its answer to a frame by type,
`pages` its answer to a path, by raw bytes. `hook` and `made` make a task of one that misbehaves.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.tasks.task import TaskSettings

Json = dict[str, Any]
Hook = Callable[["Socket", Json], Awaitable[None]]

NUMBER = {"type": "integer", "minimum": -9, "maximum": 9, "description": "what is added"}
TOOLS = [
    {
        "name": "add",
        "description": "Adds a number.",
        "input_schema": {
            "type": "object",
            "properties": {"number": NUMBER},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
    {"name": "finish", "description": "Ends.", "input_schema": {"type": "object"}},
]
CALLS = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
TEXT = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}


@dataclass
class Counter:
    """The environment of one session."""

    goal: int = 0
    value: int = 0
    steps: int = 0
    episode_id: str | None = None

    def reset(self, data: Json) -> Json:
        self.goal = int(data.get("seed", data.get("index", 0))) % 5 + 1
        self.value, self.steps, self.episode_id = 0, 0, data.get("episode_id")
        return _observation({"message": f"count to {self.goal}"}, None)

    def step(self, data: Json) -> Json:
        if data.get("type") == "list_tools":
            return _observation({"tools": TOOLS}, None)
        self.steps += 1
        if "message" in data:
            return self._said(str(data["message"]))
        name, arguments = data["tool_name"], data.get("arguments", {})
        if name == "finish":
            reward = float(self.value == self.goal)
            return _called(name, "the end", reward, done=True)
        return self._added(int(arguments["number"]))

    def _added(self, number: int) -> Json:
        if self.value + number < 0:
            kind = {
                "error_kind": "below_zero",
                "hint_template_key": "below_zero",
                "error_facts": {"value": str(self.value)},
            }
            return _called("add", "the counter cannot go below zero", 0.0, metadata=kind)
        self.value += number
        return _called("add", f"the counter is {self.value}", 0.0, metadata={"error_kind": "none"})

    def _said(self, text: str) -> Json:
        self.value += len(text)
        return _observation({"message": f"{self.value} of {self.goal}"}, 0.25, self.steps >= 3)


def _observation(said: Json, reward: float | None, done: bool = False) -> Json:
    return {"observation": {**said, "metadata": {}}, "reward": reward, "done": done}


def _called(
    name: str, text: str, reward: float, *, done: bool = False, metadata: Json | None = None
) -> Json:
    content = {"content": [{"type": "text", "text": text}], "is_error": False}
    said = {"tool_name": name, "result": content, "error": None, "metadata": metadata or {}}
    data = {"observation": said, "reward": reward, "done": done}
    return {**data, "metadata": metadata} if metadata else data


class Socket:
    """One connection, as its server sees it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.protocol = ServerProtocol(max_size=None)
        self.writer = writer
        self.counter = Counter()

    def send(self, frame: Any) -> None:
        self.send_text(json.dumps(frame))

    def send_text(self, text: str) -> None:
        self.protocol.send_text(text.encode())
        self.flush()

    def send_raw(self, data: bytes) -> None:
        self.writer.write(data)

    def error(self, code: str, message: str = "no", **fields: Any) -> None:
        self.send({"type": "error", "data": {"message": message, "code": code, **fields}})

    def observe(self, data: Json) -> None:
        self.send({"type": "observation", "data": data})

    def flush(self) -> None:
        for data in self.protocol.data_to_send():
            if data:
                self.writer.write(data)

    def abort(self) -> None:
        self.writer.transport.abort()


@dataclass
class OpenEnvServer:
    """Serves while the context is open; counts what it was asked for."""

    hooks: Mapping[str, Hook] = field(default_factory=dict)
    pages: Mapping[str, bytes] = field(default_factory=dict)
    handshake: bytes | None = None
    action: Json = field(default_factory=lambda: CALLS)
    splits: Json | None = None
    states: bool = False
    capacity: int | None = None
    token: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        self.sessions = 0
        self.opened = 0
        self.resets: list[Json] = []
        self.rewarded = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def stop(self) -> None:
        """End all connections at once, and listen no more."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        for one in self._connections:
            one.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._served(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the client has gone, or the server ends
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        lines = head.decode().lower().split("\r\n")
        if self.token is not None and f"authorization: bearer {self.token}".lower() not in lines:
            writer.write(_page("401 Unauthorized", {"detail": "no"}))
            await writer.drain()
        elif path.endswith("/ws"):
            self.opened += 1
            await self._websocket(head, reader, writer)
        else:
            length = next((int(one[15:]) for one in lines if one.startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            writer.write(self._answer(method, path, json.loads(body or b"{}")))
            await writer.drain()

    def _answer(self, method: str, path: str, body: Json) -> bytes:
        if path in self.pages:
            return self.pages[path]
        found: dict[str, Any] = {
            "/health": {"status": "healthy"},
            "/schema": {"action": self.action, "observation": {}, "state": {}},
            "/list_environments": ["counter"],
        }
        if self.splits is not None:
            kinds = {"train": "train", "test": "test"}
            found["/counter/splits"] = [
                {"name": name, "type": kinds.get(name, "validation")} for name in self.splits
            ]
            found["/counter/num_tasks"] = {"num_tasks": self.splits.get(body.get("split", ""), 0)}
        if path in found:
            return _page("200 OK", found[path])
        return _page("501 Not Implemented", {"detail": "not supported"})

    async def _websocket(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.handshake is not None:
            writer.write(self.handshake)
            await writer.drain()
            return
        socket = Socket(writer)
        socket.protocol.receive_data(head)
        request = socket.protocol.events_received()[0]
        assert isinstance(request, Request)
        socket.protocol.send_response(socket.protocol.accept(request))
        socket.flush()
        if self.capacity is not None and self.sessions >= self.capacity:
            most = {"active_sessions": self.sessions, "max_sessions": self.capacity}
            socket.error("CAPACITY_REACHED", "full", **most)
            socket.protocol.send_close(1000)
            socket.flush()
            await writer.drain()
            return
        self.sessions += 1
        try:
            await self._session(socket, reader)
        finally:
            self.sessions -= 1

    async def _session(self, socket: Socket, reader: asyncio.StreamReader) -> None:
        if "open" in self.hooks:
            await self.hooks["open"](socket, {})
        while data := await reader.read(1 << 16):
            socket.protocol.receive_data(data)
            socket.flush()
            for text in _texts(socket.protocol.events_received()):
                message = json.loads(text)
                if message["type"] == "close":
                    return  # the socket is closed with the session
                await self._frame(socket, message)
            if socket.protocol.close_expected():
                return

    async def _frame(self, socket: Socket, message: Json) -> None:
        kind, data = message["type"], message.get("data") or {}
        if kind == "reset":
            self.resets.append(data)
        if kind in self.hooks and data.get("type") != "list_tools":
            await self.hooks[kind](socket, data)
        elif data.get("type") == "list_tools" and "list_tools" in self.hooks:
            await self.hooks["list_tools"](socket, data)
        else:
            self.regular(socket, kind, data)

    def regular(self, socket: Socket, kind: str, data: Json) -> None:
        """Answer a frame as the environment does."""
        counter = socket.counter
        if kind == "reset":
            socket.observe(counter.reset(data))
        elif kind == "step":
            answer = counter.step(data)
            self.rewarded += bool(answer["done"])
            socket.observe(answer)
        elif data and not self.states:
            socket.error("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "extra"}])
        else:
            told = {"episode_id": counter.episode_id, "step_count": counter.steps}
            extra = {"turn": data["turn"], "messages": []} if data else {}
            socket.send({"type": "state", "data": {**told, **extra}})


def _texts(events: Iterable[Any]) -> list[bytes]:
    return [one.data for one in events if isinstance(one, Frame) and one.opcode is Opcode.TEXT]


def _page(status: str, value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


page = _page


CALL_S = 30.0
Send = Callable[[Socket], None]


def hook(send: Send) -> Hook:
    async def answer(socket: Socket, _data: Json) -> None:
        send(socket)
        with suppress(ConnectionError):
            await socket.writer.drain()

    return answer


def made(server: OpenEnvServer, **options: Any) -> OpenEnvTask:
    return OpenEnvTask.create(TaskSettings(call_s=CALL_S), url=server.url, **options)
