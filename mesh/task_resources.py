"""What a config lends to its tasks: a sandbox, and MCP servers.

The sandbox runs code of agents. Servers are clients of the plugin `mcp`, which needs the SDK.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from composer_mesh.configs import plugins
from composer_mesh.configs.schema import Config
from composer_mesh.configs.user_code import imported
from composer_mesh.tasks.errors import TaskError, UnusableTask, code_error
from composer_mesh.tasks.sandbox import Sandbox
from composer_mesh.tasks.task import Task

NAME_ONE = (
    "name a function that returns a sandbox as my_package.my_module:my_function, in a folder that "
    "run.import_paths names, or one of"
)


@contextmanager
def serving(config: Config, task: Task, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Let a task's sessions use the servers and the sandbox of a config while the block runs."""
    with ExitStack() as opened:
        if (servers := attach_servers(config, task, environ)) is not None:
            opened.callback(lambda: asyncio.run(servers.close()))
        if (sandbox := attach_sandbox(config, task)) is not None:
            opened.callback(lambda: asyncio.run(sandbox.close()))
        yield


def attach_servers(config: Config, task: Task, environ: Mapping[str, str]) -> Any:
    """Let a task's sessions call the servers of a config; None if it names none.

    Raises UnusableTask where the SDK or a variable of a server is missing.
    """
    if not config.environment.mcp:
        return None
    servers = _servers(config, environ)
    for part in task.parts:
        part.tool_servers = servers
    return servers


def with_tools(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """Return the config with the tools of its servers as they describe them now.

    Starts each server to ask it, and ends it again. What a config states is kept. Raises
    UnusableTask and ToolServerLost.
    """
    if all(one.tools is not None for one in config.environment.mcp):
        return config
    found = asyncio.run(_servers(config, environ).with_tools())
    environment = config.environment.model_copy(update={"mcp": found})
    return config.model_copy(update={"environment": environment})


def _servers(config: Config, environ: Mapping[str, str]) -> Any:
    return plugins.load("tool_servers", "mcp")(config.environment.mcp, environ)


def attach_sandbox(config: Config, task: Task) -> Sandbox | None:
    """Open the configured sandbox for those parts of a task that need one; None if none does.

    May take a while, because a sandbox is probed before it is used. Raises UnusableTask where it
    cannot be imported or made, where a task cannot be played in it, and whatever it says of a
    machine on which it does not hold.
    """
    parts = [part for part in task.parts if part.needs_sandbox and part.sandbox is None]
    if not parts:
        return None
    sandbox = open_configured(config)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may have a loop
        try:
            for part in parts:
                thread.submit(asyncio.run, part.check_sandbox(sandbox)).result()
        except BaseException:
            thread.submit(asyncio.run, sandbox.close()).result()
            raise
    for part in parts:
        part.sandbox = sandbox
    return sandbox


def open_configured(config: Config) -> Sandbox:
    """Return the sandbox that a config names."""
    chosen = config.environment.sandbox
    try:
        opener = imported(plugins.find("sandboxes", chosen.kind) or chosen.kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnusableTask(
            f"environment.sandbox.kind is {chosen.kind!r}, which cannot be imported ({error}): "
            f"{NAME_ONE} {plugins.known('sandboxes')}"
        ) from None
    try:
        sandbox: Sandbox = opener(**chosen.options)
    except TaskError:
        raise
    except TypeError as error:
        raise UnusableTask(
            f"environment.sandbox.options are {dict(chosen.options)}, which {chosen.kind!r} does "
            f"not take ({error}): change them"
        ) from error
    except (StopIteration, SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
        raise code_error(f"opening the sandbox {chosen.kind!r}", error) from error
    return sandbox
