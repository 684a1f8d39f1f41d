"""The command line: reads arguments, turns a bad one into one message and status 2.

Trains nothing and draws no tree itself: the heavy commands are imported only when they
run, after the config has been accepted, so that `check` loads neither torch nor Monarch.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.layout import MeshPlan, plan_mesh
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.rollouts.gsm8k_rows import DataError
from composer_mesh.rollouts.tasks import make_task
from composer_mesh.services.ablation.plan import CHANNELS_OF, plan_ablation, refuse_other_runs
from composer_mesh.services.custom_functions import check_custom_functions
from composer_mesh.services.key_checks import MissingKey, check_keys
from composer_mesh.services.offline.options import ReplayRefused, add_options, read_options
from composer_mesh.services.replay.post_reward import LateRewardError, post_reward
from composer_mesh.services.run_directory import (
    RUNS,
    RunDirectoryError,
    claimed,
    refuse_a_used,
    set_aside,
)

REFUSED, INTERRUPTED = 2, 130


class UsageError(Exception):
    """A command that cannot run as it was typed."""


REFUSALS = (
    *(ConfigError, DataError, LateRewardError, MissingKey),
    *(ReplayRefused, RunDirectoryError, UsageError),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except REFUSALS as error:
        print(f"composer-mesh: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def check(arguments: argparse.Namespace) -> int:
    """Print the resolved run and its mesh; starts nothing."""
    config = _accepted(arguments)
    print(dump_toml(config))
    print_plan(plan_mesh(config), Console())
    return 0


def train(arguments: argparse.Namespace) -> int:
    """Accept the config, claim the run directory, then hand over to the assembly."""
    config = _accepted(arguments)
    if arguments.resume:
        raise UsageError(
            "--resume is not available yet, a run goes from its first step to its last: leave it "
            "out to start a new run"
        )
    output = arguments.output or RUNS / config.run.name
    if arguments.output:
        refuse_a_used(output)
    elif place := set_aside(output):
        print(f"composer-mesh: moved the earlier run to {place}", file=sys.stderr)
    with claimed(output):
        return _train(config, output)


def ablate(arguments: argparse.Namespace) -> int:
    """Accept every run of the ablation, train what has not finished, then print the table."""
    plan = plan_ablation(
        arguments.config,
        arguments.set,
        _items(arguments.arms),
        _numbers("--seeds", arguments.seeds),
        arguments.eval_every,
    )
    for run in plan.runs:
        _accept(run.config)
    output = arguments.output or RUNS / f"{plan.base.run.name}-ablation"
    refuse_other_runs(plan, output)
    with claimed(output):
        from composer_mesh.services.ablation.command import ablate_command

        return ablate_command(plan, output, _train)


def _train(config: Config, output: Path) -> int:
    """Hand over to the assembly, which loads torch and Monarch."""
    prepare_environment()  # Monarch reads it when the assembly imports it
    with _interrupt_kept():
        from composer_mesh.services.assembly import train_command

    return int(train_command(config, output, resume=False))


@contextmanager
def _interrupt_kept() -> Iterator[None]:
    """Hold a Ctrl-C back until the block ends: an import may swallow a KeyboardInterrupt."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _accepted(arguments: argparse.Namespace) -> Config:
    """The config, once all that it names was found; raises what `main` turns into one message."""
    config = load_config(arguments.config, arguments.set)
    _accept(config)
    return config


def _accept(config: Config) -> None:
    make_task(config)
    check_keys(config)
    try:
        check_custom_functions(config)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(item) for item in _items(text)]
    except ValueError:
        raise UsageError(
            f"{option} is {text!r} but must be whole numbers with commas between them: write for "
            f"example {option} 0,1,2"
        ) from None


def tree(arguments: argparse.Namespace) -> int:
    """Show the live mesh of a run."""
    from composer_mesh.services.tree import tree_command

    return int(tree_command(arguments.run, arguments.json, arguments.watch))


def replay(arguments: argparse.Namespace) -> int:
    """Ask teachers about the states of stored traces; no mesh is started."""
    options = read_options(arguments)
    from composer_mesh.services.offline.command import replay_command

    return replay_command(options)


def reward(arguments: argparse.Namespace) -> int:
    """Post a reward for a rollout that a run has stored, also after it was trained on."""
    post_reward(arguments.run, arguments.trace, arguments.reward, arguments.source)
    return 0


def print_plan(plan: MeshPlan, console: Console) -> None:
    """The mesh as tables: actors, channels, transports."""
    actors = Table("actor", "what it does", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("replicas", "processes", "threads each"):
        actors.add_column(title, justify="right")
    for row in plan.actors:
        counts = (str(row.replicas), str(row.processes), str(row.threads))
        actors.add_row(row.kind, row.role, *counts)
    actors.add_section()
    actors.add_row("total", f"{plan.threads} threads when all are busy", "", str(plan.processes))
    console.print(actors)
    console.print("channels", style="italic")
    for channel in plan.channels:
        console.print(f"  {channel.name}: weight {channel.weight:g}, {_state(channel.on)}")
    console.print("transports", style="italic")
    for transport in plan.transports:
        console.print(f"  {transport}", markup=False, highlight=False, soft_wrap=True)


def _state(on: bool) -> str:
    return "on" if on else "off, costs nothing"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer-mesh",
        description="Train agentic language models in one supervised Monarch mesh.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("composer-mesh"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_check(commands.add_parser("check", help=check.__doc__, allow_abbrev=False))
    _add_train(commands.add_parser("train", help="train and evaluate a run", allow_abbrev=False))
    _add_ablate(
        commands.add_parser(
            "ablate", help="compare a run with and without its channels", allow_abbrev=False
        )
    )
    _add_replay(
        commands.add_parser(
            "replay", help="preference pairs from the traces of a run", allow_abbrev=False
        )
    )
    _add_reward(commands.add_parser("reward", help=reward.__doc__, allow_abbrev=False))
    _add_tree(commands.add_parser("tree", help=tree.__doc__, allow_abbrev=False))
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=V",
        help="override one key; V is a TOML value or bare text; may be given many times",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.set_defaults(command=check)


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the run is written; runs/NAME when not given, an earlier run there moves aside",
    )
    parser.add_argument("--resume", action="store_true", help="not available yet")
    parser.set_defaults(command=train)


def _add_ablate(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    arms = ",".join(CHANNELS_OF)
    parser.add_argument("--arms", default=arms, metavar="A,B", help=f"of {arms}; all by default")
    parser.add_argument(
        "--seeds", default="0,1,2", metavar="S,T", help="seeds of each arm; 0,1,2 by default"
    )
    parser.add_argument(
        "--eval-every",
        type=int,
        metavar="N",
        help="steps between held-out evaluations; eval.every, or else a tenth of the run",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the runs are; runs/NAME-ablation when not given; finished runs there are kept",
    )
    parser.set_defaults(command=ablate)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.set_defaults(command=replay)


def _add_reward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run")
    parser.add_argument("trace", metavar="TRACE", help="a trace_id of its traces")
    parser.add_argument("reward", type=float, metavar="REWARD", help="in place of its first one")
    parser.add_argument("--source", default="", metavar="TEXT", help="who says so; kept with it")
    parser.set_defaults(command=reward)


def _add_tree(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="a run directory; the latest by default"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="keep drawing until Ctrl-C")
    parser.set_defaults(command=tree)
