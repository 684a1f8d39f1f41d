"""CLI commands on existing runs: inspect or change a live one, or read a finished one.

Each imports its implementation when it runs.
"""

import argparse
from pathlib import Path

from composer_mesh.configs import plugins
from composer_mesh.services.commands.parser import RUN, argument, as_json, command
from composer_mesh.services.inspection.ending import ending_of


@command(
    "show the mesh of a live run: hosts, processes and actors",
    RUN,
    as_json("one object"),
    argument("--watch", action="store_true", help="redraw until Ctrl-C"),
    group="runs",
    example="tree runs/quickstart --watch",
)
def tree(arguments: argparse.Namespace) -> int:
    """Show the live mesh of a run, or of several islands."""
    from composer_mesh.services.inspection.tree import tree_command

    for name in plugins.own("trees"):
        shown = plugins.load("trees", name)(arguments.run, arguments.json, arguments.watch)
        if shown is not None:
            return int(shown)
    status = int(tree_command(arguments.run, arguments.json, arguments.watch))
    if arguments.watch and not arguments.json:
        _print_ending(arguments.run)
    return status


@command(
    "show the events of a run, also while it is running",
    RUN,
    argument("--follow", action="store_true", help="continue until the run ends"),
    as_json("each event"),
    group="runs",
    example="events runs/quickstart --follow",
)
def events(arguments: argparse.Namespace) -> int:
    """Show the events of a run, also while it is running."""
    from composer_mesh.services.inspection.events_command import events_command

    status = events_command(arguments.run, arguments.follow, arguments.json)
    if not arguments.json:
        _print_ending(arguments.run)
    return status


def _print_ending(run: Path) -> None:
    """Print how a run ended, unless it is live."""
    if (ended := ending_of(run)) is not None:
        print("", *ended.lines(), sep="\n")


@command(
    "change the number of replicas in a live run",
    RUN,
    argument(
        "sizes",
        nargs="+",
        metavar="KIND=N",
        help="number of replicas of a kind, for example generator=3",
    ),
    group="runs",
    example="scale runs/quickstart generator=3",
)
def scale(arguments: argparse.Namespace) -> int:
    """Change the number of replicas of a live run."""
    from composer_mesh.services.scale_command import scale_command

    return scale_command(arguments.run, arguments.sizes)


@command(
    "show the Python stacks of the processes of a live run",
    RUN,
    argument("--all", action="store_true", help="show idle threads too"),
    argument("--native", action="store_true", help="show calls of C code too"),
    as_json("each process with all its threads"),
    group="runs",
    example="stacks runs/quickstart --native",
)
def stacks(arguments: argparse.Namespace) -> int:
    """Show the Python stacks of each process of a live run."""
    from composer_mesh.services.inspection.inspect_commands import stacks_command

    return stacks_command(arguments.run, arguments.native, arguments.json, arguments.all)


@command(
    "open Monarch's own terminal interface on a live run",
    RUN,
    group="runs",
    example="tui runs/quickstart",
)
def tui(arguments: argparse.Namespace) -> int:
    """Open Monarch's own terminal interface on a live run."""
    from composer_mesh.services.inspection.inspect_commands import tui_command

    return tui_command(arguments.run)


@command(
    "check a run directory for damaged or missing data",
    RUN,
    as_json("one object"),
    group="runs",
    example="verify runs/quickstart",
)
def verify(arguments: argparse.Namespace) -> int:
    """Report damaged, missing and left-over files, rows and checkpoints of a run directory."""
    from composer_mesh.services.store.verification import verify_command

    return verify_command(arguments.run, arguments.json)
