"""CLI commands about tasks: write a new one, play an episode, serve one to others.

Each imports its implementation when it runs.
"""

import argparse
import functools
import sys

from pydantic import ValidationError

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.arguments import first_refused_option


def new_task(arguments: argparse.Namespace) -> int:
    """Write a package with a runnable task."""
    from composer_mesh.services.new_task.command import NewTaskRefused, new_task_command

    try:
        return new_task_command(arguments.name, arguments.folder)
    except NewTaskRefused as refused:
        raise UsageError(str(refused)) from refused


def make_code_tasks(arguments: argparse.Namespace) -> int:
    """Make coding tasks of source distributions, or check those of a file."""
    from composer_mesh.services.make_code_tasks import command
    from composer_mesh.services.make_code_tasks.built_in import BUILT_IN

    options = command.MakeOptions(
        sources=(*arguments.sources, *(BUILT_IN if arguments.built_in else ())),
        output=arguments.output,
        limit=arguments.limit,
        jobs=arguments.jobs,
        heldout=tuple(arguments.heldout),
        packages=tuple(arguments.packages),
        folders=tuple(arguments.folders),
        indexes=tuple(arguments.index_url),
        suite_s=arguments.suite_s,
        generated=arguments.generated,
        bugs=arguments.bugs,
        rename=arguments.rename,
        check=arguments.check,
        sample=arguments.sample,
        gradings=arguments.gradings,
    )
    try:
        return command.make_code_tasks_command(options, functools.partial(print, flush=True))
    except command.MakeRefused as refused:
        raise UsageError(str(refused)) from refused


def play(arguments: argparse.Namespace) -> int:
    """Play an episode of a task in the terminal."""
    from composer_mesh.services.play.command import PlayOptions, play_command
    from composer_mesh.services.play.policies import PlayRefused

    options = PlayOptions(
        arguments.episode,
        arguments.split,
        arguments.scripted,
        echo=bool(arguments.scripted) or not sys.stdin.isatty(),
    )
    try:
        return play_command(arguments.task, arguments.set, options)
    except PlayRefused as refused:
        raise UsageError(str(refused)) from refused


def serve_env(arguments: argparse.Namespace) -> int:
    """Serve a task to OpenEnv and MCP clients."""
    from composer_mesh.services.serve_env.command import serve_env as serve
    from composer_mesh.services.serve_env.options import ServeOptions
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
