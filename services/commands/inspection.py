"""CLI commands on existing runs: inspect or change a live one, or read a finished one.

Each imports its implementation when it runs.
"""

import argparse
from pathlib import Path
from typing import Any

from composer_mesh.configs import plugins
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import RUN, argument, as_json, command
from composer_mesh.services.inspection.ending import ending_of
from composer_mesh.services.offline.options import add_options, read_options
from composer_mesh.services.replay.post_reward import post_rewards, read_posts
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.services.traces.options import add_options as add_traces_options


@command(
    "show the mesh of a live run: hosts, processes and actors",
    RUN,
    as_json("one object"),
    argument("--watch", action="store_true", help="keep drawing until Ctrl-C"),
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
    "show what happened in a run, or happens now",
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
        "sizes", nargs="+", metavar="KIND=N", help="replicas to have, for example generator=3"
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
    "query the telemetry of a live run in SQL",
    RUN,
    argument("sql", metavar="SQL", help='for example "SELECT * FROM actors"'),
    as_json("each row"),
    group="runs",
    example='query runs/quickstart "SELECT * FROM actors"',
)
def query(arguments: argparse.Namespace) -> int:
    """Query the telemetry of a live run."""
    from composer_mesh.services.inspection.inspect_commands import query_command

    return query_command(arguments.run, arguments.sql, arguments.json)


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
    "make preference pairs of the traces of a run",
    add_options,
    signals=True,
    group="tasks",
    example="replay runs/quickstart --output pairs.jsonl --dry-run",
)
def replay(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Query teachers about the states of stored traces; no mesh is started."""
    options = read_options(arguments)
    from composer_mesh.services.offline.command import replay_command

    return replay_command(options, signals)


@command(
    "list, show and export the rollouts of a run",
    add_traces_options,
    group="runs",
    example="traces runs/quickstart show 12/0",
)
def traces(arguments: argparse.Namespace) -> int:
    """List, show or export the rollouts that a run has stored."""
    from composer_mesh.services.traces.command import traces_command

    return traces_command(arguments)


class _Reward(argparse.Action):
    """Stores REWARD; without RUN, the words before it are one place further left."""

    def __call__(
        self, parser: argparse.ArgumentParser, found: Any, value: Any, _option: Any = None
    ) -> None:
        if value is None and found.trace is not None:
            try:
                found.run, found.trace, value = None, str(found.run), float(found.trace)
            except ValueError:
                parser.error(f"REWARD is {found.trace[:40]!r} but must be a number")
        found.reward = value


@command(
    "post a reward for a rollout of a run, also after training on it",
    RUN,
    argument("trace", nargs="?", metavar="TRACE", help="a trace_id of its traces"),
    argument(
        "reward",
        nargs="?",
        type=float,
        action=_Reward,
        metavar="REWARD",
        help="in place of its first one",
    ),
    argument(
        "--file", type=Path, metavar="FILE", help="JSON lines with trace_id and reward, for many"
    ),
    argument(
        "--follow", type=Path, metavar="FILE", help="the same, and what is added until the run ends"
    ),
    argument(
        "--openenv",
        metavar="URL",
        help="post what an OpenEnv server tells of this run's episodes, until the run ends",
    ),
    argument("--token-env", metavar="NAME", help="environment variable with the server's token"),
    argument("--source", default="", metavar="TEXT", help="who says so; kept with it"),
    group="runs",
    example="reward runs/quickstart train/12/0/1 0.5",
)
def reward(arguments: argparse.Namespace) -> int:
    """Post a reward for a stored rollout of a run, also after it was trained on."""
    one = [value for value in (arguments.trace, arguments.reward) if value is not None]
    many = [one for one in (arguments.file, arguments.follow, arguments.openenv) if one is not None]
    if (len(one), len(many)) not in ((2, 0), (0, 1)):
        raise UsageError(
            "reward takes TRACE and REWARD, --file FILE, --follow FILE or --openenv URL: give one "
            "of them"
        )
    if arguments.openenv is not None:
        follow_server = plugins.load("reward_servers", "openenv")
        return int(
            follow_server(arguments.run, arguments.openenv, arguments.token_env, arguments.source)
        )
    if arguments.follow is not None:
        from composer_mesh.services.replay.post_reward import follow_rewards

        return follow_rewards(arguments.run, arguments.follow, arguments.source)
    posts = read_posts(arguments.file) if arguments.file else {one[0]: one[1]}
    post_rewards(arguments.run, posts, arguments.source)
    return 0


@command(
    "find what is damaged or missing in a run directory",
    RUN,
    as_json("one object"),
    group="runs",
    example="verify runs/quickstart",
)
def verify(arguments: argparse.Namespace) -> int:
    """Report damaged, missing and left-over files, rows and checkpoints of a run directory."""
    from composer_mesh.services.store.verification import verify_command

    return verify_command(arguments.run, arguments.json)
