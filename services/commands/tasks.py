"""CLI commands about tasks: write a new one, play an episode.

Each imports its implementation when it runs.
"""

import argparse
import sys

from composer_mesh.services.checks.accepting import UsageError


def new_task(arguments: argparse.Namespace) -> int:
    """Write a package with a runnable task."""
    from composer_mesh.services.new_task.command import NewTaskRefused, new_task_command

    try:
        return new_task_command(arguments.name, arguments.folder)
    except NewTaskRefused as refused:
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
