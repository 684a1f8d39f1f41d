"""All MCP servers of a config, as a task's sessions call them, and the connections to each.

Connections are shared by all sessions, or one for each. They live on an event loop in a thread of
their own: whatever a server in this process does there, its caller continues. A connection that
broke is replaced, later after each failure in a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from composer_mesh.configs.environment import McpServer, McpTool
from composer_mesh.configs.installed import installed_version
from composer_mesh.mesh.waiting import LoopThread
from composer_mesh.tasks.errors import ToolServerLost, UnusableTask
from composer_mesh.tasks.tool import ExternalTool

if TYPE_CHECKING:
    from composer_mesh.plugins.mcp.connection import McpConnection

T = TypeVar("T")
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0


class ServerConnections:
    """All connections of this process to one server."""

    def __init__(self, server: McpServer, environ: Mapping[str, str]) -> None:
        from composer_mesh.plugins.mcp.connection import McpConnection  # it needs the SDK

        self._server, self._new = server, partial(McpConnection, server, environ)
        self._thread = LoopThread(f"mcp {server.name}")
        self._shared: list[McpConnection] = []
        self._own: dict[str, McpConnection] = {}
        most = server.processes if server.transport == "stdio" else 1_000_000
        self._slots = asyncio.Semaphore(most)
        self._opening = asyncio.Lock()
        self._failures, self._not_before = 0, 0.0

    async def tools(self) -> tuple[McpTool, ...]:
        """Open a connection only to return the server's tools."""
        return await self._there(self._tools())

    async def with_tools(self) -> McpServer:
        """Return the server with its tools, requested unless the config states them; close."""
        try:
            if self._server.tools is not None:
                return self._server
            return self._server.model_copy(update={"tools": await self.tools()})
        finally:
            await self.close()

    async def call(self, key: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool for a session. Raises ToolError or ToolServerLost."""
        return await self._there(self._call(key, name, arguments))

    def end(self, key: str) -> None:
        """Close the connection of a session, if it has one; does not wait."""
        if self._server.sessions == "own":
            self._thread.start(self._end(key))

    async def close(self) -> None:
        """Close all connections. Waits for the ends of the server's processes."""
        await self._there(self._close())
        await asyncio.to_thread(self._thread.close)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the connections; raise ToolServerLost if that is stuck."""
        limit_s = self._server.start_s + self._server.call_s
        try:
            async with asyncio.timeout(limit_s + 2.0):
                return await self._thread.run(work)
        except TimeoutError:
            raise ToolServerLost(
                self._server.name, f"its connections have not moved for {limit_s:g} s"
            ) from None

    async def _tools(self) -> tuple[McpTool, ...]:
        one = self._new()
        try:
            return await one.open()
        finally:
            await one.close()

    async def _call(self, key: str, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            async with asyncio.timeout(self._server.start_s):
                connection = await self._connection(key)
        except TimeoutError:
            raise ToolServerLost(
                self._server.name,
                f"no connection was ready within start_s, {self._server.start_s:g} s: it does not "
                "start or answer, or all of its processes are taken: raise start_s or processes",
            ) from None
        return await connection.call(name, arguments)

    async def _connection(self, key: str) -> McpConnection:
        if self._server.sessions == "own":
            return await self._own_of(key)
        if (found := self._least_busy()) is not None:
            return found
        async with self._opening:  # one start at a time
            if (found := self._least_busy()) is not None:
                return found
            self._drop_broken()
            self._shared.append(await self._opened())
            return self._shared[-1]

    def _least_busy(self) -> McpConnection | None:
        """Return the open connection with the fewest calls; None where another one is better."""
        usable = [one for one in self._shared if one.is_open]
        best = min(usable, key=lambda one: one.calls, default=None)
        grows = self._server.transport == "stdio" and len(usable) < self._server.processes
        return None if best is None or (grows and best.calls) else best

    def _drop_broken(self) -> None:
        self._shared = [one for one in self._shared if one.is_open]

    async def _own_of(self, key: str) -> McpConnection:
        found = self._own.get(key)
        if found is None:
            await self._slots.acquire()
            try:
                found = self._own[key] = await self._opened()
            except BaseException:
                self._slots.release()
                raise
        if not found.is_open:
            raise ToolServerLost(
                self._server.name, "it has ended, and this session's state with it"
            )
        return found

    async def _opened(self) -> McpConnection:
        """Open a connection, not before the pause after the last failure is over."""
        await asyncio.sleep(max(0.0, self._not_before - self._thread.loop.time()))
        one = self._new()
        try:
            await one.open()
        except BaseException:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._failures)
            self._failures += 1
            self._not_before = self._thread.loop.time() + pause_s
            await one.close()
            raise
        self._failures = 0
        return one

    async def _end(self, key: str) -> None:
        if (one := self._own.pop(key, None)) is not None:
            try:
                await one.close()
            finally:
                self._slots.release()

    async def _close(self) -> None:
        every = [*self._shared, *self._own.values()]
        self._shared, self._own = [], {}
        await asyncio.gather(*(one.close() for one in every))


class McpServers:
    """The servers of a config; nothing is started before the first call."""

    def __init__(self, servers: Sequence[McpServer], environ: Mapping[str, str]) -> None:
        """`environ` has the variables that servers are given. Raises UnusableTask."""
        refuse_missing(servers, environ)
        self._servers: dict[str, ServerConnections] = {
            one.name: ServerConnections(one, environ) for one in servers
        }

    async def with_tools(self) -> tuple[McpServer, ...]:
        """Return the servers with their tools as they describe them now; what has some is kept.

        Starts each server to ask it, and ends it again. Raises UnusableTask and ToolServerLost.
        """
        return tuple(await asyncio.gather(*(one.with_tools() for one in self._servers.values())))

    async def call(self, key: str, tool: ExternalTool, arguments: Mapping[str, Any]) -> str:
        """Call a tool for a session; see `ServerConnections.call`."""
        return await self._servers[tool.server].call(key, tool.remote, arguments)

    def end(self, key: str) -> None:
        """Close what is open for a session; does not wait."""
        for one in self._servers.values():
            one.end(key)

    async def close(self) -> None:
        """Close all connections. Waits for the ends of the servers' processes."""
        await asyncio.gather(*(one.close() for one in self._servers.values()))


def refuse_missing(servers: Sequence[McpServer], environ: Mapping[str, str]) -> None:
    """Raise UnusableTask where the SDK or a variable of a server is missing."""
    installed = installed_version("mcp") or "not installed"
    if not installed.startswith("2.") or installed.startswith(("2.0.", "2.1.", "2.2.")):
        raise UnusableTask(
            f"environment.mcp names servers, but the package mcp is {installed} and must be 2.3 or "
            "a later 2.x: pip install 'composer-mesh[mcp]'"
        )
    for server in servers:
        for name in server.variables:
            if not environ.get(name):
                raise UnusableTask(
                    f"the MCP server {server.name!r} needs the environment variable {name}, which "
                    "is not set: export it, or remove it from env or token_env in its table"
                )
