"""The transport to a stdio server: JSON-RPC messages over the pipes of a program.

Its error stream goes to a bounded file in the logs of the run, without the values of the variables
that the server was given.

What an MCP server says, made fit for a prompt: bounded, and without control characters.
"""

from __future__ import annotations

import asyncio
import json
import os
import unicodedata
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from composer_mesh.actors.provider.endpoint import Secret
from composer_mesh.configs.environment import McpServer
from composer_mesh.mesh.monarch_log import LOGS, open_in_logs
from composer_mesh.mesh.programs import TiedProgram

LONGEST_RESULT = 100_000
"""Characters of a tool's result that the agent reads."""
LONGEST_DESCRIPTION = 4_000
LONGEST_PARAMETERS = 10_000
"""Characters of a tool's schema as JSON; a tool with a larger one is refused."""
LONGEST_ERROR = 500

_KEPT = "\n\t"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")
"""Unicode categories without a glyph: control and format characters, surrogates, unassigned."""


def clean(text: str, longest: int) -> str:
    """Return a text without characters that are not shown, cut to `longest` with a note."""
    kept = text[: 2 * longest]
    shown = "".join(c for c in kept if c in _KEPT or unicodedata.category(c) not in _HIDDEN)
    if len(text) <= longest:
        return shown
    return f"{shown[:longest]}… ({len(text):,} characters, cut)"


def clean_json(value: Any) -> Any:
    """Return a JSON value with all its texts cleaned."""
    if isinstance(value, str):
        return clean(value, LONGEST_PARAMETERS)
    if isinstance(value, list):
        return [clean_json(one) for one in value]
    if isinstance(value, dict):
        return {clean(str(key), LONGEST_PARAMETERS): clean_json(one) for key, one in value.items()}
    return value


def result_text(blocks: Sequence[Any], structured: Any) -> str:
    """Return the content of a result: its texts, line by line, and the names of other kinds."""
    parts = [_block(one) for one in blocks]
    if not parts and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    return clean("\n".join(parts), LONGEST_RESULT)


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    resource = getattr(block, "resource", None)
    if resource is not None and isinstance(getattr(resource, "text", None), str):
        return str(resource.text)
    about = getattr(block, "uri", None) or getattr(resource, "uri", None)
    about = about or getattr(block, "mime_type", None)
    return f"[{block.type}: {about}]" if about else f"[{block.type}]"


INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG")
LONGEST_LINE = 16 << 20
"""Bytes of the longest message of a server."""
LARGEST_LOG = 1 << 20
LAST_BYTES = 2_000


class StdioProgram:
    """A server's program, as a transport of the SDK. `last` is what it last said on stderr."""

    def __init__(self, server: McpServer, environ: Mapping[str, str]) -> None:
        given = {name: environ[name] for name in server.env if name in environ}
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self._server, self._env = server, {**inherited, **given}
        self._secrets = [Secret(one) for one in given.values()]
        self.last = b""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[TransportStreams]:
        """Start the program; end it, and wait for its end, at the end of the block."""
        server = self._server
        assert server.command is not None
        program = TiedProgram([server.command, *server.args], self._env, server.cwd)
        try:
            async with _pipes(program.streams) as (writer, reader, errors):
                log = asyncio.create_task(self._kept(errors, program.pid))
                try:
                    async with _messages(writer, reader) as streams:
                        yield streams
                finally:
                    program.close()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(log), 5.0)
                    log.cancel()
        finally:
            program.close()
            with anyio.CancelScope(shield=True):
                await asyncio.to_thread(program.wait)

    async def _kept(self, errors: asyncio.StreamReader, pid: int) -> None:
        """Write the error stream to a file until that is full, and read on."""
        folder = os.environ.get(LOGS)
        name, written = f"mcp-{self._server.name}-{pid}.log", 0
        file = open_in_logs(Path(folder) / name) if folder else os.open(os.devnull, os.O_WRONLY)
        try:
            while piece := await _line(errors):
                for secret in self._secrets:
                    piece = secret.hide_bytes(piece)
                self.last = (self.last + piece)[-LAST_BYTES:]
                if written < LARGEST_LOG:
                    written += os.write(file, piece[: LARGEST_LOG - written])
        finally:
            os.close(file)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, or what is there of one that is too long; empty at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as rest:
        return bytes(rest.partial)
    except asyncio.LimitOverrunError as long:
        return await reader.readexactly(long.consumed)


@asynccontextmanager
async def _pipes(
    streams: tuple[IO[bytes], IO[bytes], IO[bytes]],
) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader]]:
    loop = asyncio.get_running_loop()
    to_program, from_program, errors = streams
    transports: list[asyncio.BaseTransport] = []
    readers = []
    for stream, limit in ((from_program, LONGEST_LINE), (errors, 1 << 16)):
        reader = asyncio.StreamReader(limit=limit)
        made = partial(asyncio.StreamReaderProtocol, reader)
        transports.append((await loop.connect_read_pipe(made, stream))[0])
        readers.append(reader)
    flow = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    out, _ = await loop.connect_write_pipe(lambda: flow, to_program)
    try:
        yield asyncio.StreamWriter(out, flow, None, loop), readers[0], readers[1]
    finally:
        for transport in (out, *transports):
            transport.close()


@asynccontextmanager
async def _messages(
    writer: asyncio.StreamWriter, reader: asyncio.StreamReader
) -> AsyncIterator[TransportStreams]:
    """Yield the SDK's streams of messages; the incoming one ends with the program's output."""
    received: Any = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent: Any = anyio.create_memory_object_stream[SessionMessage](0)

    async def receive() -> None:
        async with received[0]:
            with suppress(
                ValueError, ConnectionError, anyio.BrokenResourceError, anyio.ClosedResourceError
            ):
                while line := await reader.readline():
                    await received[0].send(_parsed(line))

    async def send() -> None:
        async with sent[1]:
            try:
                async for one in sent[1]:
                    text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                    writer.write(text.encode() + b"\n")
                    await writer.drain()
            except OSError:
                await received[0].aclose()  # the calls under way learn that nobody answers

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        tasks.start_soon(send)
        try:
            yield received[1], sent[0]
        finally:
            for stream in (received[1], sent[0]):
                stream.close()
            tasks.cancel_scope.cancel()


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error
