"""CLI commands on the stored rollouts of a run: list and export them, query teachers, post rewards.

Each imports its implementation when it runs.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_mesh.configs import plugins
from composer_mesh.configs.errors import did_you_mean, nearest
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import (
    RUN,
    add_set,
    argument,
    as_json,
    command,
    output,
)
from composer_mesh.services.directory.claim import RUNS, output_path
from composer_mesh.services.offline.options import CONCURRENCY, read_options
from composer_mesh.services.replay.post_reward import post_rewards, read_posts
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.services.traces.options import ACTIONS, FORMATS, SHOWN, SORT_KEYS


def _add_traces(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `traces`."""
    RUN(parser)
    parser.add_argument(
        "action",
        nargs="?",
        metavar="ACTION",
        help="list the rollouts (the default), show one, or export them",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        action=_Trace,
        metavar="TRACE",
        help="rollout for show: a trace_id, or GROUP/SAMPLE",
    )
    _add_filters(parser)
    _add_list_options(parser)
    parser.add_argument("--full", action="store_true", help="show long texts in full")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="parquet",
        help="format of the export (default: parquet)",
    )
    output("where export writes")(parser)


class _Trace(argparse.Action):
    """Stores TRACE and checks ACTION; without RUN, both words are one place further left."""

    def __call__(
        self, parser: argparse.ArgumentParser, found: Any, value: Any, _option: Any = None
    ) -> None:
        if str(found.run) in ACTIONS:
            if value is not None:
                parser.error(f"{value[:40]!r} is one word too many after {found.run} TRACE")
            found.run, found.action, value = None, str(found.run), found.action
        found.action, found.trace = found.action or "list", value
        if found.action not in ACTIONS:
            near = nearest(found.action, ACTIONS) or nearest(str(found.run), ACTIONS)
            repair = did_you_mean(near) if near else f"write one of {', '.join(ACTIONS)}"
            parser.error(f"{found.action[:40]!r} is not an action: {repair}")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--group", type=int, metavar="N", help="rollouts of prompt group N")
    parser.add_argument(
        "--step", type=int, metavar="N", help="rollouts that trained step N, from 1"
    )
    parser.add_argument("--split", choices=("train", "heldout"), help="rollouts of this split")
    parser.add_argument(
        "--min-reward", type=float, metavar="R", help="rollouts with this reward or more"
    )
    parser.add_argument(
        "--max-reward", type=float, metavar="R", help="rollouts with this reward or less"
    )
    parser.add_argument("--failed", action="store_true", help="rollouts without success")
    parser.add_argument(
        "--error",
        action="append",
        default=[],
        metavar="KIND",
        help="rollouts with an error of this kind; may be given many times",
    )


def _add_list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sort",
        choices=SORT_KEYS,
        default="group",
        help="order of the list, smallest first (default: group)",
    )
    parser.add_argument("--reverse", action="store_true", help="list the largest first")
    parser.add_argument(
        "--limit",
        type=int,
        default=SHOWN,
        metavar="N",
        help=f"maximum number of rollouts to list; 0 lists all (default: {SHOWN})",
    )
    as_json("each rollout")(parser)


@command(
    "list, show and export the rollouts of a run",
    _add_traces,
    group="runs",
    example="traces runs/quickstart show 12/0",
)
def traces(arguments: argparse.Namespace) -> int:
    """List, show or export the rollouts that a run has stored."""
    from composer_mesh.services.traces.command import traces_command

    return traces_command(arguments)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `replay`."""
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="RUN|TRACES",
        help=(
            f"run directory (default: the newest in {RUNS}/), its traces folder, or a .jsonl "
            "file of traces"
        ),
    )
    parser.add_argument(
        "--teachers",
        metavar="SPEC",
        help=(
            "TOML file with [replay] and [[replay.teachers]], or OpenRouter model ids "
            "separated by commas (default: the run's own teachers)"
        ),
    )
    parser.add_argument(
        "--max-usd",
        type=float,
        metavar="USD",
        help=(
            "maximum cost of this replay, including its repetitions (default: replay.budget.usd)"
        ),
    )
    output(
        "where the pairs are written, as JSON lines; what has been paid for is next to it in "
        "FILE.replay, so that the same command continues",
        metavar="FILE",
    )(parser)
    add_set(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="price the job and stop; sends no query"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="query only the first N states")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=CONCURRENCY,
        metavar="N",
        help=f"states in flight at once (default: {CONCURRENCY})",
    )
    parser.add_argument(
        "--report", type=output_path, metavar="FILE", help="write the report to this file too"
    )


@command(
    "make preference pairs from the traces of a run",
    _add_replay,
    signals=True,
    group="tasks",
    example="replay runs/quickstart --output pairs.jsonl --dry-run",
)
def replay(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Query teachers about the states of stored traces; no mesh is started."""
    options = read_options(arguments)
    from composer_mesh.services.offline.command import replay_command

    return replay_command(options, signals)


class _Reward(argparse.Action):
    """Stores REWARD; without RUN, the words before it are one place further left."""

    def __call__(
        self, _parser: argparse.ArgumentParser, found: Any, value: Any, _option: Any = None
    ) -> None:
        if value is None and found.trace is not None:
            with suppress(ValueError):  # not a number: REWARD is missing, which the command says
                found.run, found.trace, value = None, str(found.run), float(found.trace)
        found.reward = value


@command(
    "post a reward for a rollout of a run, also after training on it",
    RUN,
    argument("trace", nargs="?", metavar="TRACE", help="trace_id of a rollout of the run"),
    argument(
        "reward",
        nargs="?",
        type=float,
        action=_Reward,
        metavar="REWARD",
        help="reward that replaces the first one",
    ),
    argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="JSON lines with trace_id and reward, for many rewards",
    ),
    argument(
        "--follow",
        type=Path,
        metavar="FILE",
        help="like --file, and post what is appended until the run ends",
    ),
    argument(
        "--openenv",
        metavar="URL",
        help="post what an OpenEnv server reports about this run's episodes, until the run ends",
    ),
    argument("--token-env", metavar="NAME", help="environment variable with the server's token"),
    argument("--source", default="", metavar="TEXT", help="source of the reward, stored with it"),
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
