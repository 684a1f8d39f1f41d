"""One connection to one MCP server: opened and closed by a task of its own.

HTTP answers of an MCP server that end its connection, rather than being reported to the agent.

The SDK turns a status such as 503, or 404 for a session that the server no longer knows, into an
error of the call; but it says nothing about the call.

The list of a server's tools, as a config pins it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT

from composer_mesh.actors.provider.endpoint import Secret
from composer_mesh.configs import user_code
from composer_mesh.configs.environment import MOST_TOOLS, McpServer, McpTool
from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.mesh.programs import ProgramFailed
from composer_mesh.plugins.mcp.stdio import (
    LONGEST_DESCRIPTION,
    LONGEST_ERROR,
    LONGEST_PARAMETERS,
    StdioProgram,
    clean,
    clean_json,
    result_text,
)
from composer_mesh.tasks.errors import ToolError, ToolServerLost, UnusableTask

BAD_REQUEST = 400
LONGEST_ANSWER = 16 << 20
"""Bytes of the longest answer that is not a stream of events, which the SDK bounds by event."""

PLAIN = {"Accept-Encoding": "identity"}
"""A header of all requests: a compressed answer could be far larger than what is read of it."""

MEANINGS = {
    401: "it refuses the token",
    403: "it refuses the token",
    404: "it no longer knows the session, or the path of url",
    429: "it has too many requests",
}


class HttpAnswers:
    """Reads the answers of one connection, as a hook of its HTTP client."""

    def __init__(self) -> None:
        self.has_session = False
        """Whether the server has given the connection a session."""

        self.is_open = False
        """Whether calls are made; while it connects, the SDK tries what a server knows."""

        self.problem: str | None = None
        """Why the connection has ended; None while it has not."""

    async def read(self, response: Any) -> None:
        """Raise HttpRefused for an answer that is no answer to a call."""
        self.has_session |= MCP_SESSION_ID in response.headers
        if (coding := response.headers.get("content-encoding", "identity")) != "identity":
            raise self._refused(f"it answered in the encoding {coding[:40]!r}, not plainly")
        if int(response.headers.get("content-length", 0)) > LONGEST_ANSWER:
            raise self._too_long()
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, self._too_long)
        if self.is_open and response.request.method == "POST" and response.status_code >= 400:
            if response.status_code == BAD_REQUEST and _refuses_arguments(await response.aread()):
                return
            status = response.status_code
            raise self._refused(f"{MEANINGS.get(status, 'it failed')} (status {status})")

    def _too_long(self) -> HttpRefused:
        return self._refused(f"it answered with more than {LONGEST_ANSWER:,} bytes")

    def _refused(self, problem: str) -> HttpRefused:
        self.problem = problem
        return HttpRefused(problem)


class HttpRefused(Exception):
    """An answer that ends a connection."""


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, which ends with an error after `LONGEST_ANSWER` bytes."""

    def __init__(self, whole: httpx2.AsyncByteStream, too_long: Callable[[], HttpRefused]) -> None:
        self._whole, self._too_long = whole, too_long

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._whole:
            read += len(chunk)
            if read > LONGEST_ANSWER:
                raise self._too_long()
            yield chunk

    async def aclose(self) -> None:
        await self._whole.aclose()


def _refuses_arguments(body: bytes) -> bool:
    """Whether the body of a refusal is an error about a call's arguments."""
    try:
        found = json.loads(body)
        return bool(found["error"]["code"] == INVALID_PARAMS)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


MOST_PAGES = 20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


async def listed(client: Any, server: McpServer) -> tuple[McpTool, ...]:
    """Return the tools that a config takes from a server, in the server's order.

    Raises UnusableTask for a list that cannot be used.
    """
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        found += page.tools
        cursor = page.next_cursor
        if cursor is None or len(found) > 10 * MOST_TOOLS:
            break
    return pinned(server, found)


def pinned(server: McpServer, tools: Sequence[Any]) -> tuple[McpTool, ...]:
    """Return tools as a config pins them; raises UnusableTask."""
    names = [str(one.name) for one in tools]
    for key, wanted in (("allow", server.allow), ("deny", server.deny)):
        if missing := sorted(set(wanted) - set(names)):
            raise UnusableTask(
                f"environment.mcp: {key} of the MCP server {server.name!r} names {missing[0]!r}, "
                f"which it does not have: it has {clean(', '.join(names), 1000) or 'no tools'}"
            )
    used = [one for one in tools if _is_used(server, str(one.name))]
    if not used or len(used) > MOST_TOOLS:
        raise UnusableTask(
            f"the MCP server {server.name!r} has {len(used)} tools that are used but must have 1 "
            f"to {MOST_TOOLS}: change its allow and deny in [[environment.mcp]]"
        )
    return tuple(_pinned(server, one) for one in used)


def _is_used(server: McpServer, name: str) -> bool:
    return name not in server.deny and (not server.allow or name in server.allow)


def _pinned(server: McpServer, tool: Any) -> McpTool:
    name = clean(str(tool.name), 100)
    if not _NAME.fullmatch(str(tool.name)):
        raise UnusableTask(
            f"the MCP server {server.name!r} has a tool {name!r}, but a name is 1 to 64 letters, "
            "digits and _.-: name the tools that are used in its allow"
        )
    parameters = clean_json(tool.input_schema)
    text = json.dumps(parameters, ensure_ascii=False, sort_keys=True)
    if len(text) > LONGEST_PARAMETERS:
        raise UnusableTask(
            f"the schema of tool {name!r} of the MCP server {server.name!r} has {len(text):,} "
            f"characters but may have {LONGEST_PARAMETERS:,}: add {name!r} to its deny"
        )
    description = clean(tool.description or "", LONGEST_DESCRIPTION)
    return McpTool(name=name, description=description, parameters=text)


def difference(before: Sequence[McpTool], now: Sequence[McpTool]) -> str:
    """Return in words what has changed in tools that prompts show; empty if nothing has."""
    current = {one.name: one for one in now}
    gone = [one.name for one in before if one.name not in current]
    other = [one.name for one in before if current.get(one.name, one) != one]
    parts = [f"{', '.join(gone)} is gone"] * bool(gone)
    parts += [f"{', '.join(other)} is described differently"] * bool(other)
    return ", ".join(parts)


FAILED_CALL, LATE_CALL = "mcp_tool_error", "mcp_timeout"
"""Error kinds of a call that the server refused or failed, and of one without a timely answer."""


class McpConnection:
    """A connection to a server; several calls may be under way at once."""

    def __init__(self, server: McpServer, environ: Mapping[str, str]) -> None:
        self._server, self._environ = server, environ
        self._program = StdioProgram(server, environ) if server.transport == "stdio" else None
        self._answers = HttpAnswers()
        given = (environ.get(name, "") for name in server.secrets)
        self._secrets = [Secret(one) for one in given]
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[tuple[McpTool, ...]] = (
            asyncio.get_running_loop().create_future()
        )
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self.calls = 0
        """Number of calls under way."""

    @property
    def is_open(self) -> bool:
        """Whether calls can be made: it was opened, and nothing has broken it."""
        return self._client is not None and not self._closing.is_set()

    async def open(self) -> tuple[McpTool, ...]:
        """Connect; return the server's tools. Raises ToolServerLost or UnusableTask."""
        self._task = asyncio.create_task(self._serve(), name=f"mcp {self._server.name}")
        try:
            tools = await asyncio.wait_for(asyncio.shield(self._opened), self._server.start_s)
        except TimeoutError:
            self._task.cancel()
            raise self._lost(
                f"it has not answered in start_s, {self._server.start_s:g} s"
            ) from None
        self._refuse_changed(tools)
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a result. Raises ToolError for a failed call, and ToolServerLost."""
        limit_s = self._server.call_s
        self.calls += 1
        try:
            async with asyncio.timeout(limit_s + 1.0):
                result = await self._client.call_tool(
                    name, dict(arguments), read_timeout_seconds=limit_s
                )
        except MCPError as error:
            raise self._error_of(name, error) from error
        except TimeoutError:
            raise self._late(name) from None
        except Exception as error:  # whatever broke the connection
            raise self._broken(error) from error
        finally:
            self.calls -= 1
        text = self._hidden(result_text(result.content, result.structured_content))
        if result.is_error:
            raise ToolError(FAILED_CALL, text or f"{name} failed", {"tool": name})
        return text

    async def close(self) -> None:
        """Close it. Waits for the end of the server's process."""
        self._closing.set()
        if self._task is not None:
            if not self._opened.done():
                self._task.cancel()
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        try:
            async with self._target() as target, Client(target, mode=self._mode) as client:
                self._refuse_without_session()
                tools = await listed(client, self._server)
                self._client, self._answers.is_open = client, True
                self._opened.set_result(tools)
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
            self._closing.set()
            if not self._opened.done():
                self._opened.set_exception(self._reason(error))
                self._opened.exception()  # it may no longer be waited for

    @property
    def _keeps_session(self) -> bool:
        """Whether the server has to tell the connection's state from that of others."""
        return self._server.transport == "http" and self._server.sessions == "own"

    @property
    def _mode(self) -> str:
        """Versions of the protocol that the SDK may use; since 2026-07-28 HTTP has no sessions."""
        return "legacy" if self._keeps_session else "auto"

    def _refuse_without_session(self) -> None:
        if self._keeps_session and not self._answers.has_session:
            raise UnusableTask(
                f"the MCP server {self._server.name!r} gives no sessions over HTTP, but its "
                'sessions is "own": episodes would share their state; set sessions = "shared", or '
                "start the server with sessions"
            )

    @asynccontextmanager
    async def _target(self) -> AsyncIterator[Any]:
        """Yield what the SDK's client connects to."""
        server = self._server
        if self._program is not None:
            yield self._program.connected()
        elif server.url is not None:
            token = self._environ.get(server.token_env or "", "")
            headers = PLAIN | ({"Authorization": f"Bearer {token}"} if token else {})
            async with create_mcp_http_client(headers=headers) as http:
                http.event_hooks["response"] = [self._answers.read]
                yield streamable_http_client(server.url, http_client=http)
        else:
            assert server.module is not None
            yield imported(server)

    def _refuse_changed(self, tools: tuple[McpTool, ...]) -> None:
        known = self._server.tools
        if known is not None and (changed := difference(known, tools)):
            self._closing.set()
            raise self._lost(
                f"its tools have changed since the run began: {changed}; run the version of the "
                "server with which the run began"
            )

    def _reason(self, error: BaseException) -> Exception:
        """Return why a connection could not be opened, from what is inside of groups."""
        error = _inner(error)
        if isinstance(error, UnusableTask | ToolServerLost):
            return error
        if isinstance(error, ProgramFailed):
            return self._lost(str(error))
        return self._lost(f"it cannot be reached ({_short(error)}){self._said()}")

    def _error_of(self, name: str, error: MCPError) -> Exception:
        if error.code == REQUEST_TIMEOUT:
            return self._late(name)
        if error.code == CONNECTION_CLOSED:
            return self._broken(error)
        text = self._hidden(clean(str(error), LONGEST_ERROR))
        return ToolError(FAILED_CALL, text, {"tool": name})

    def _late(self, name: str) -> ToolError:
        text = f"{name} took longer than {self._server.call_s:g} s"
        return ToolError(LATE_CALL, text, {"tool": name})

    def _broken(self, error: BaseException) -> ToolServerLost:
        self._closing.set()
        reason = self._answers.problem or _short(error)
        return self._lost(f"it was lost under a call ({reason}){self._said()}")

    def _said(self) -> str:
        last = b"" if self._program is None else self._program.last
        line = last.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f": {clean(line, LONGEST_ERROR)}" if line else ""

    def _lost(self, reason: str) -> ToolServerLost:
        return ToolServerLost(self._server.name, self._hidden(reason))

    def _hidden(self, text: str) -> str:
        """Return a text without the keys that the server was given."""
        for secret in self._secrets:
            text = secret.hide(text)
        return text


def imported(server: McpServer) -> Any:
    """Return the server object of a module; raises UnusableTask."""
    assert server.module is not None
    try:
        found = user_code.imported(server.module)
        return found() if callable(found) else found
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise UnusableTask(
            f"module of the MCP server {server.name!r} is {server.module!r}, which cannot be "
            f"imported ({_short(error)}): install it, or name its folder in run.import_paths"
        ) from error


def _inner(error: BaseException) -> BaseException:
    """Return the first error that is inside of groups."""
    return _inner(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _short(error: BaseException) -> str:
    error = _inner(error)
    return clean(f"{type(error).__name__}: {error}", LONGEST_ERROR)
