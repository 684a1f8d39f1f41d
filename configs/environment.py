"""The section `[environment]`: the actors that step episodes.

Tables `[[environment.mcp]]` are MCP servers whose tools agents may call with the task's own. They
contain no credentials: `env` and `token_env` name environment variables. `[environment.sandbox]`
is where tasks run code that agents wrote.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    FilePath,
    FreeTable,
    Processes,
    Seconds,
    Section,
    Share,
    repeated,
)


class SandboxConfig(Section):
    """A sandbox of each environment actor, for tasks that need one."""

    kind: Annotated[str, Field(min_length=1, max_length=1000)] = "bubblewrap"
    """`"bubblewrap"`, `"containers"` for Harbor tasks, or the import path of a function that
    returns a sandbox.

    A path is as "my_package.my_module:my_function", searched in run.import_paths too, or as
    "my_file.py:my_function"."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of the function; the guides "Sandboxes" and "Harbor tasks" list them."""


MOST_SERVERS = 32
MOST_TOOLS = 128
MOST_ARGUMENTS = 200

ServerName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=40)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
ToolNames = Annotated[tuple[ToolName, ...], Field(strict=False, max_length=MOST_TOOLS)]

NEEDED = {"stdio": "command", "http": "url", "module": "module"}
"""The key that each transport needs."""
TAKEN = {
    "stdio": ("args", "env", "cwd"),
    "http": ("token_env",),
    "module": (),
}
"""Further keys that each transport takes."""
_ORDINARY = re.compile(r"PATH|HOME|LANG|TZ|PYTHON\w*|LC_\w+|LD_\w+|(?i:\w+_proxy)")
"""Variables that programs need and that hold no secret."""


class McpTool(Section):
    """A tool as its server described it when the run was started."""

    name: ToolName
    """Name of the tool on its server."""

    description: str = ""
    """The server's description of the tool."""

    parameters: str
    """JSON schema of its arguments, as JSON text."""


class McpServer(Section):
    """One MCP server."""

    name: ServerName
    """Name of the server in errors and logs; unique in the config."""

    transport: Literal["stdio", "http", "module"]
    """"stdio" (a program), "http" (a URL, streamable HTTP), or "module" (an object in Python)."""

    command: str | None = None
    """Program of a stdio server, found on PATH."""

    args: Annotated[tuple[str, ...], Field(strict=False, max_length=MOST_ARGUMENTS)] = ()
    """Arguments of the program."""

    env: Annotated[tuple[Variable, ...], Field(strict=False, max_length=MOST_ARGUMENTS)] = ()
    """Names of environment variables that the program receives in addition to HOME, PATH, SHELL and
    TERM.

    Only their names are stored. No other process of the run inherits them, except for ordinary
    ones such as PYTHONPATH and HTTPS_PROXY."""

    cwd: FilePath | None = None
    """Working directory of the program; the one where the command runs by default."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")] | None = None
    """Address of an HTTP server, without credentials."""

    token_env: Variable | None = None
    """Name of the environment variable with the bearer token of an HTTP server."""

    module: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """An MCPServer, or a function that returns one, as "package.module:server"."""

    allow: ToolNames = ()
    """Names of the tools that are used; by default all tools."""

    deny: ToolNames = ()
    """Names of tools that are not used."""

    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$", max_length=40)] = ""
    """Put before the name of each tool that agents see."""

    start_s: Seconds = 20.0
    """Seconds that the server's start may take, including the wait for a free server."""

    call_s: Seconds = 30.0
    """Seconds after which a call becomes an error that the agent reads."""

    processes: Annotated[int, Field(ge=1, le=1000)] = 4
    """Maximum number of processes of a stdio server in each environment actor."""

    sessions: Literal["shared", "own"] = "shared"
    """"own": each episode gets its own connection, and with stdio its own process, for servers that
    keep state between calls. "shared": episodes share them."""

    tools: Annotated[tuple[McpTool, ...], Field(strict=False, max_length=MOST_TOOLS)] | None = None
    """The tools as the server described them at the start of the run; written by the run."""

    def _problems(self) -> Iterator[str]:
        needed = NEEDED[self.transport]
        if getattr(self, needed) is None:
            yield f"{needed} is not set but transport is {self.transport!r}: set {needed}"
        own = {needed, *TAKEN[self.transport]}
        every = {*NEEDED.values(), *(key for keys in TAKEN.values() for key in keys)}
        for key in sorted(every - own):
            if getattr(self, key) not in (None, ()):
                yield (
                    f"{key} is set but transport is {self.transport!r}, which does not use it: "
                    f"remove {key}"
                )
        if both := set(self.allow) & set(self.deny):
            yield f"{min(both)!r} is in allow and in deny: remove it from one of them"

    @property
    def secrets(self) -> tuple[str, ...]:
        """The variables that no other process of the run inherits."""
        return tuple(name for name in self.variables if not _ORDINARY.fullmatch(name))

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the environment variables that the server needs."""
        return self.env if self.token_env is None else (*self.env, self.token_env)


class EnvironmentConfig(Section):
    """The actors that step episodes."""

    replicas: Processes = 1
    """Number of environment actors."""

    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 6
    """Number of assistant turns after which an episode ends unsolved."""

    calls_per_turn: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Maximum tool calls of one action; they run in order, and more make the action malformed."""

    tool_error_penalty: Share = 0.0
    """Reward penalty for each failed tool call; it takes no reward below 0."""

    call_s: Seconds = 60.0
    """Seconds that one call of a task's tool, reward or other function may take."""

    hang_s: Seconds = 10.0
    """CPU seconds that a task's code may hold the interpreter before its process is killed."""

    mcp: Annotated[tuple[McpServer, ...], Field(strict=False, max_length=MOST_SERVERS)] = ()
    """MCP servers whose tools are added to the task's: tables [[environment.mcp]]."""

    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where a task such as "code" runs the agents' code."""

    def _problems(self) -> Iterator[str]:
        for name in repeated(one.name for one in self.mcp):
            yield f"two tables of mcp have the name {name!r}: give each its own name"
        for one in self.mcp:
            if one.start_s + one.call_s >= self.call_s:
                yield (
                    f"call_s is {self.call_s:g} but start_s and call_s of the MCP server "
                    f"{one.name!r} are {one.start_s:g} and {one.call_s:g}, and both are waited for "
                    "in one call: raise environment.call_s above their sum, or lower them"
                )
