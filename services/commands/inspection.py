"""CLI commands on existing runs: inspect or change a live one, or read a finished one.

Each imports its implementation when it runs.
"""

import argparse
from pathlib import Path

from composer_mesh.configs import plugins
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import argument, command
from composer_mesh.services.offline.options import add_options, read_options
from composer_mesh.services.replay.post_reward import post_rewards, read_posts
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.services.traces.options import add_options as add_traces_options

RUN = argument(
    "run", nargs="?", type=Path, metavar="RUN", help="a run directory; the latest by default"
)


@command(
    "show the live mesh of a run",
    RUN,
    argument("--json", action="store_true", help="print one JSON object"),
    argument("--watch", action="store_true", help="keep drawing until Ctrl-C"),
)
def tree(arguments: argparse.Namespace) -> int:
    """Show the live mesh of a run, or of several islands."""
    from composer_mesh.services.inspection.tree import tree_command

    for name in plugins.own("trees") if arguments.run is not None else ():
        shown = plugins.load("trees", name)(arguments.run, arguments.json, arguments.watch)
        if shown is not None:
            return int(shown)
    return int(tree_command(arguments.run, arguments.json, arguments.watch))


@command(
    "what happened in a run, or happens now",
    RUN,
    argument("--follow", action="store_true", help="continue until the run ends"),
    argument("--json", action="store_true", help="print each event as one JSON object"),
)
def events(arguments: argparse.Namespace) -> int:
    """Show the events of a run, also while it is running."""
    from composer_mesh.services.inspection.events_command import events_command

    return events_command(arguments.run, arguments.follow, arguments.json)


@command(
    "more or fewer replicas in a live run",
    argument("run", type=Path, metavar="RUN", help="the directory of a live run"),
    argument(
        "sizes", nargs="+", metavar="KIND=N", help="replicas to have, for example generator=3"
    ),
)
def scale(arguments: argparse.Namespace) -> int:
    """Change the number of replicas of a live run."""
    from composer_mesh.services.scale_command import scale_command

    return scale_command(arguments.run, arguments.sizes)


@command(
    "the Python stacks of every process of a live run",
    RUN,
    argument("--native", action="store_true", help="show calls of C code too"),
    argument("--json", action="store_true", help="print each process as one object"),
)
def stacks(arguments: argparse.Namespace) -> int:
    """Show the Python stacks of each process of a live run."""
    from composer_mesh.services.inspection.inspect_commands import stacks_command

    return stacks_command(arguments.run, arguments.native, arguments.json)


@command(
    "ask the telemetry of a live run in SQL",
    argument("run", type=Path, metavar="RUN", help="the directory of a live run"),
    argument("sql", metavar="SQL", help='for example "SELECT * FROM actors"'),
    argument("--json", action="store_true", help="print each row as one object"),
)
def query(arguments: argparse.Namespace) -> int:
    """Query the telemetry of a live run."""
    from composer_mesh.services.inspection.inspect_commands import query_command

    return query_command(arguments.run, arguments.sql, arguments.json)


@command(
    "open Monarch's own terminal interface on a live run",
    RUN,
)
def tui(arguments: argparse.Namespace) -> int:
    """Open Monarch's own terminal interface on a live run."""
    from composer_mesh.services.inspection.inspect_commands import tui_command

    return tui_command(arguments.run)


@command(
    "preference pairs from the traces of a run",
    add_options,
    signals=True,
)
def replay(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Query teachers about the states of stored traces; no mesh is started."""
    options = read_options(arguments)
    from composer_mesh.services.offline.command import replay_command

    return replay_command(options, signals)


@command(
    "the rollouts of a run: list, show and export them",
    add_traces_options,
)
def traces(arguments: argparse.Namespace) -> int:
    """List, show or export the rollouts that a run has stored."""
    from composer_mesh.services.traces.command import traces_command

    return traces_command(arguments)


@command(
    "post a reward for a rollout of a run, also after training on it",
    argument("run", type=Path, metavar="RUN", help="the directory of the run"),
    argument("trace", nargs="?", metavar="TRACE", help="a trace_id of its traces"),
    argument("reward", nargs="?", type=float, metavar="REWARD", help="in place of its first one"),
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
    argument("run", type=Path, metavar="DIR", help="the directory of a run"),
    argument("--json", action="store_true", help="print one JSON object"),
)
def verify(arguments: argparse.Namespace) -> int:
    """Report damaged, missing and left-over files, rows and checkpoints of a run directory."""
    from composer_mesh.services.store.verification import verify_command

    return verify_command(arguments.run, arguments.json)
