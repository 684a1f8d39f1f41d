"""The command line: reads arguments, turns a bad one into one message and status 2.

Trains nothing and draws no tree itself: the heavy commands are imported only when they
run, after the config has been accepted, so that `check` loads neither torch nor Monarch.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from composer_mesh.actors.engines.vllm_checks import check_vllm_fits, check_vllm_installed
from composer_mesh.actors.engines.vllm_installed import VllmUnavailable
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.changes import Change
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.layout import plan_mesh
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.rollouts.gsm8k_rows import DataError
from composer_mesh.rollouts.tasks import make_task
from composer_mesh.services.ablation.plan import plan_ablation, refuse_other_runs
from composer_mesh.services.cli_parser import make_parser
from composer_mesh.services.control import ControlRefused
from composer_mesh.services.custom_functions import check_custom_functions
from composer_mesh.services.key_checks import MissingKey, check_keys
from composer_mesh.services.live_run import RunUnavailable
from composer_mesh.services.offline.options import ReplayRefused, read_options
from composer_mesh.services.placement_table import print_placement
from composer_mesh.services.plan_table import print_plan
from composer_mesh.services.replay.post_reward import LateRewardError, post_reward
from composer_mesh.services.resume import refuse_unfit
from composer_mesh.services.run_directory import (
    RUNS,
    RunDirectoryError,
    claimed,
    refuse_a_used,
    set_aside,
)
from composer_mesh.services.seats import Seats, refuse_other_hosts
from composer_mesh.services.store.rows import DamagedRecord, StoreMissing
from composer_mesh.services.store.schema import STORE_FILE
from composer_mesh.services.traces.options import TracesRefused

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


class UsageError(Exception):
    """A command that cannot run as it was typed."""


REFUSALS = (
    *(ConfigError, ControlRefused, DamagedRecord, DataError, LateRewardError, MissingKey),
    *(ReplayRefused, RunDirectoryError, StoreError, StoreMissing, TracesRefused, UsageError),
    VllmUnavailable,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        return int(COMMANDS[arguments.command](arguments))
    except REFUSALS as error:
        print(f"composer-mesh: {error}", file=sys.stderr)
        return REFUSED
    except RunUnavailable as error:
        print(f"composer-mesh: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def check(arguments: argparse.Namespace) -> int:
    """Print the resolved run, its mesh and its placement; starts nothing."""
    config = load_config(arguments.config, arguments.set, model_later=True)
    seats = _accept(config)
    if not config.placement.hosts:  # hosts that are described need not be this one
        check_vllm_installed(config)
    print(dump_toml(config))
    print_plan(plan_mesh(config), Console())
    print_placement(seats, Console())
    return 0


def train(arguments: argparse.Namespace) -> int:
    """Accept the config, claim the run directory, then hand over to the assembly."""
    config = _accepted(arguments)
    if arguments.rollout_only or arguments.replay_traces:
        return _half(config, arguments.output, arguments.replay_traces)
    output, resumed = arguments.output or RUNS / config.run.name, None
    if arguments.resume:
        resumed = refuse_unfit(output, config)
    else:
        _make_room(output, named=arguments.output is not None)
    with claimed(output):
        return _train(config, output, resumed)


def _half(config: Config, output: Path | None, source: Path | None) -> int:
    """Train on the rollouts of a run alone, or sample alone where no run is named."""
    place = output or RUNS / f"{config.run.name}-{'replayed' if source else 'rollouts'}"
    if source is not None and not (source / STORE_FILE).is_file():
        raise UsageError(
            f"--replay-traces {source} has no {STORE_FILE} but must be the directory of a run: "
            "correct it, or resume a run of an older version once, which makes it"
        )
    _make_room(place, named=output is not None)
    with claimed(place):
        prepare_environment()  # Monarch reads it when the assembly imports it
        with _interrupt_kept():
            from composer_mesh.services.halves.command import half_command

        return half_command(config, place, source)


def _make_room(output: Path, named: bool) -> None:
    """A directory that the user has named must be new; an earlier run in another one moves."""
    if named:
        refuse_a_used(output)
    elif place := set_aside(output):
        print(f"composer-mesh: moved the earlier run to {place}", file=sys.stderr)


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
        refuse_other_hosts(run.config)
        check_vllm_installed(run.config)
    output = arguments.output or RUNS / f"{plan.base.run.name}-ablation"
    refuse_other_runs(plan, output)
    with claimed(output):
        from composer_mesh.services.ablation.command import ablate_command

        return ablate_command(plan, output, _train)


def _train(config: Config, output: Path, resumed: Sequence[Change] | None = None) -> int:
    """Hand over to the assembly, which loads torch and Monarch.

    A run that goes on comes with the changes of its config.
    """
    prepare_environment()  # Monarch reads it when the assembly imports it
    with _interrupt_kept():
        from composer_mesh.services.assembly import train_command

    return int(train_command(config, output, resumed))


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
    refuse_other_hosts(config)
    check_vllm_installed(config)
    return config


def _accept(config: Config) -> Seats:
    """The placement of a run whose config, keys and functions are in order."""
    make_task(config)
    check_keys(config)
    check_vllm_fits(config)
    try:
        check_custom_functions(config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Seats.of(config)


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


def events(arguments: argparse.Namespace) -> int:
    """Show what happened in a run, also while it happens."""
    from composer_mesh.services.events_command import events_command

    return events_command(arguments.run, arguments.follow, arguments.json)


def scale(arguments: argparse.Namespace) -> int:
    """Change how many replicas a live run has."""
    from composer_mesh.services.scale_command import scale_command

    return scale_command(arguments.run, arguments.sizes)


def stacks(arguments: argparse.Namespace) -> int:
    """Show what each process of a live run is doing."""
    from composer_mesh.services.inspect_commands import stacks_command

    return stacks_command(arguments.run, arguments.native, arguments.json)


def query(arguments: argparse.Namespace) -> int:
    """Ask the telemetry of a live run."""
    from composer_mesh.services.inspect_commands import query_command

    return query_command(arguments.run, arguments.sql, arguments.json)


def tui(arguments: argparse.Namespace) -> int:
    """Open Monarch's own terminal interface on a live run."""
    from composer_mesh.services.inspect_commands import tui_command

    return tui_command(arguments.run)


def replay(arguments: argparse.Namespace) -> int:
    """Ask teachers about the states of stored traces; no mesh is started."""
    options = read_options(arguments)
    from composer_mesh.services.offline.command import replay_command

    return replay_command(options)


def traces(arguments: argparse.Namespace) -> int:
    """List, show or export the rollouts that a run has stored."""
    from composer_mesh.services.traces.command import traces_command

    return traces_command(arguments)


def reward(arguments: argparse.Namespace) -> int:
    """Post a reward for a rollout that a run has stored, also after it was trained on."""
    post_reward(arguments.run, arguments.trace, arguments.reward, arguments.source)
    return 0


def check_run(arguments: argparse.Namespace) -> int:
    """Say what in a run directory is not as it was written."""
    from composer_mesh.services.store.check_command import check_run_command

    return check_run_command(arguments.run, arguments.json)


COMMANDS = {
    "check": check,
    "check-run": check_run,
    "train": train,
    "ablate": ablate,
    "replay": replay,
    "reward": reward,
    "traces": traces,
    "events": events,
    "scale": scale,
    "tree": tree,
    "stacks": stacks,
    "query": query,
    "tui": tui,
}
