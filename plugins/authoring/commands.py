"""CLI commands about tasks: write a new one, play an episode.

Each imports its implementation when it runs.
"""

import argparse
import sys

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import add_set, argument, command, output


@command(
    "write a package with a task of your own, ready to run",
    argument("name", metavar="NAME", help="name of the package, such as my_task"),
    output("where it is written, a new or empty folder (default: ./NAME)"),
    group="tasks",
    example="new-task my_task",
)
def new_task(arguments: argparse.Namespace) -> int:
    """Write a package with a runnable task."""
    from composer_mesh.plugins.authoring.new_task import NewTaskRefused, new_task_command

    try:
        return new_task_command(arguments.name, arguments.output)
    except NewTaskRefused as refused:
        raise UsageError(str(refused)) from refused


@command(
    "play an episode of a task in the terminal",
    argument(
        "task",
        metavar="TASK|CONFIG",
        help="task as in data.task, such as my_task.py:MyTask; or a TOML file or preset",
    ),
    argument(
        "--episode",
        type=int,
        default=0,
        metavar="N",
        help="number of the episode, from 0 (default: 0)",
    ),
    argument(
        "--split",
        choices=("train", "heldout"),
        default="train",
        help="split of the episode (default: train)",
    ),
    argument(
        "--scripted",
        default="",
        metavar="expert|FILE",
        help="act by the task's expert, or by a file with an action a line, in place of a person",
    ),
    add_set,
    many_files=True,
    group="tasks",
    example="play my_task/my_task/task.py:ShopTask --episode 3",
)
def play(arguments: argparse.Namespace) -> int:
    """Play an episode of a task in the terminal."""
    from composer_mesh.plugins.authoring.play import PlayOptions, PlayRefused, play_command

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
