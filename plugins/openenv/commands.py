"""The command that serves a task. It imports its implementation when it runs."""

import argparse
import functools
from pathlib import Path

from pydantic import ValidationError

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import (
    add_listen,
    add_set,
    command,
    first_refused_option,
    seconds,
)


def _add_serve_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        metavar="TASK|CONFIG",
        help="task as in data.task, such as my_task.py:MyTask; or a TOML file or preset",
    )
    add_listen(parser, 8000)
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes that share the port (default: 1)",
    )
    parser.add_argument(
        "--session-timeout",
        type=seconds,
        default=900.0,
        metavar="S",
        help="seconds without a request after which a session ends (default: 900)",
    )
    parser.add_argument(
        "--max-sessions",
        type=int,
        default=10_000,
        metavar="N",
        help="maximum number of sessions at once (default: 10000)",
    )
    add_set(parser)


@command(
    "offer a task to others as an OpenEnv and MCP server",
    _add_serve_env,
    many_files=True,
    group="servers",
    example="serve-env my_task/my_task/task.py:ShopTask --port 8000",
)
def serve_env(arguments: argparse.Namespace) -> int:
    """Serve a task to OpenEnv and MCP clients."""
    from composer_mesh.plugins.openenv.server.command import ServeOptions
    from composer_mesh.plugins.openenv.server.command import serve_env as serve
    from composer_mesh.services.web.options import ServeRefused

    try:
        options = ServeOptions(
            host=arguments.host,
            port=arguments.port,
            processes=arguments.processes,
            session_timeout_s=arguments.session_timeout,
            max_sessions=arguments.max_sessions,
            allowed_hosts=tuple(arguments.allow_host),
            any_address=arguments.any_address,
        )
        say = functools.partial(print, flush=True)
        return serve(arguments.task, arguments.set, options, arguments.token_env, say)
    except ValidationError as error:
        raise UsageError(first_refused_option(error)) from None
    except ServeRefused as refused:
        raise UsageError(str(refused)) from refused


def follow_rewards(run: Path, url: str, token_env: str | None, source: str | None) -> int:
    """Post the late rewards of a server until the run ends; return the exit status.

    `token_env` is the environment variable with the server's token. Raises LateRewardError where
    the run takes no late rewards.
    """
    from composer_mesh.plugins.openenv.client.options import read_options
    from composer_mesh.plugins.openenv.client.server import Server
    from composer_mesh.plugins.openenv.served_rewards import follow_server

    options = read_options({"url": url} | ({"token_env": token_env} if token_env else {}))
    server = Server(options, options.headers(), options.connect_s)
    return follow_server(run, server, source or f"server {options.url}")
