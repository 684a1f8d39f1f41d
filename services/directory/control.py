"""Control socket of a run: commands from other processes of the same user to its controller.

    client  -- {"command": "scale", "arguments": {...}} -->  controller
            <-- {"answer": ...} or {"refused": "why"} or {"failed": "why"} --

One line each way, then the connection ends. The Unix socket is in the run's directory with access
for its owner only; there is no network listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from composer_mesh.mesh.tcp_peer import peer_user
from composer_mesh.mesh.untrusted_json import parsed_json
from composer_mesh.mesh.waiting import BackgroundTasks, Failed, reported_to_loop
from composer_mesh.services.directory.status import NotRunning, RunUnavailable

CONTROL_FILE = "control.sock"
LONGEST_REPLY = 64 << 20
"""Bytes of a reply; stacks of many processes are some megabytes."""
LONGEST_ADDRESS = 100
"""Path length in bytes that every system allows for a socket; Linux and macOS allow a few more."""


Command = Callable[..., Awaitable[Any]]


class ControlRefused(Exception):
    """The controller refuses the command; the message says why and what to do instead."""


class Control:
    """Serves commands while its block runs: `async with Control(run, {"scale": scale}):`.

    A command that raises `ControlRefused` had no effect. A running command continues when the
    client disconnects, and is cancelled when the block ends. `failed` is called with errors that
    reach no client.
    """

    def __init__(
        self, run: Path, commands: Mapping[str, Command], failed: Failed = reported_to_loop
    ) -> None:
        self._path, self._commands = run / CONTROL_FILE, commands
        self._server: asyncio.Server | None = None
        self._serving = BackgroundTasks(failed)

    async def __aenter__(self) -> Self:
        self._path.unlink(missing_ok=True)  # left by a controller that was killed
        self._server = await asyncio.start_unix_server(self._begin, sock=_listening(self._path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self._path.unlink(missing_ok=True)
        await self._serving.close()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.start("serving a command", self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readline()
            writer.write(_line(await self._reply(request)))
            await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the client disconnected, or sent a line without a newline
        finally:
            writer.close()

    async def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = parsed_json(line)
            command, arguments = str(request["command"]), dict(request["arguments"])
        except (ValueError, KeyError, TypeError):
            return {"refused": "a request is one JSON object with a command and its arguments"}
        if command not in self._commands:
            known = ", ".join(sorted(self._commands))
            return {"refused": f"{command!r} is not a command of this run, which knows {known}"}
        try:
            return {"answer": await self._commands[command](**arguments)}
        except ControlRefused as error:
            return {"refused": str(error)}
        except Exception as error:  # noqa: BLE001  the run continues; the client gets the error
            return {"failed": f"{type(error).__name__}: {error}"}


async def ask(run: Path, command: str, **arguments: Any) -> Any:
    """Send a command to the controller of a live run. Waits for its result."""
    try:
        reader, writer = await _connected(run / CONTROL_FILE)
    except OSError as error:
        raise NotRunning(
            run,
            f"{run} takes no commands ({error.strerror or error}): it is not running, or does not "
            "train yet",
        ) from error
    try:
        _refuse_another_user(run, writer)
        writer.write(_line({"command": command, "arguments": arguments}))
        line = await reader.readline()
    except ValueError:  # more than the reader holds, without an end
        line = b""
    finally:
        writer.close()
    if not line.endswith(b"\n"):
        raise RunUnavailable(f"{run} ended before {command} was done: look at its events")
    reply = parsed_json(line)
    if "refused" in reply:
        raise ControlRefused(reply["refused"])
    if "failed" in reply:
        raise RunUnavailable(f"{command} failed: {reply['failed']}")
    return reply["answer"]


def _refuse_another_user(run: Path, writer: asyncio.StreamWriter) -> None:
    """Raise RunUnavailable if the socket is served by another user than this one."""
    connected: socket.socket = writer.get_extra_info("socket")
    uid = peer_user(connected)
    if uid != os.geteuid():
        raise RunUnavailable(
            f"the controller of {run} belongs to user {uid}, whose runs take no commands of yours: "
            "only they can change it"
        )


async def _connected(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with _address(path) as address:
        return await asyncio.open_unix_connection(address, limit=LONGEST_REPLY)


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            os.fchmod(listener.fileno(), 0o600)  # on Linux the file is created with this mode
            listener.bind(address)
        path.chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a socket path that is short enough for the system, valid inside the block."""
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
