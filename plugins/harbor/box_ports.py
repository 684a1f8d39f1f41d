"""Ports that this process serves to a container, while a context lasts.

    program in the box -- 127.0.0.1:PORT of the box --> this process

The socket in the box is one that this process accepts on: no program of the image takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

MOST_CONNECTIONS = 64
"""Of a port at once; what is beyond is closed."""
CHUNK = 1 << 16
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(listening: socket.socket, serve: Serve) -> AsyncIterator[None]:
    """Serve each connection to a listening socket; the end of the context ends them all."""
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams are served as tasks"
        connections[task] = writer
        try:
            if server.is_serving() and len(connections) <= MOST_CONNECTIONS:
                with contextlib.suppress(asyncio.CancelledError):  # by the end of the context
                    await serve(reader, writer)
        finally:
            del connections[task]
            writer.close()

    server = await asyncio.start_server(connected, sock=listening, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        for task, writer in connections.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*connections)


async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: Stream) -> None:
    """Pass bytes both ways between two connections until one side ends; close the other one."""
    theirs, ours = other
    pumps = [
        asyncio.ensure_future(pumped(reader, ours)),
        asyncio.ensure_future(pumped(theirs, writer)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ours.close()  # before anything that the end of the context may cancel
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def pumped(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    passing: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Pass bytes on until their source ends; `passing` gets them first."""
    with contextlib.suppress(OSError):  # as its end: the other side sees it too
        while content := await source.read(CHUNK):
            passing(content)
            target.write(content)
            await target.drain()
