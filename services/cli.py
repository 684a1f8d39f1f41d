"""The command line: parses arguments; invalid ones give one message and status 2.

The commands are in `commands`. `launch.reach` runs a command about a run whose controller is on
another machine on that machine.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from composer_mesh.actors.engines.vllm_installed import VllmUnavailable
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.errors import ConfigError
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.checks.keys import MissingKey
from composer_mesh.services.checks.open_files import allow_open_files
from composer_mesh.services.commands import (
    clusters,
    evaluation,
    inspection,
    serving,
    tasks,
    training,
)
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.commands.retired import refuse_retired
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.control import ControlRefused
from composer_mesh.services.directory.live import RunUnavailable
from composer_mesh.services.launch.ports import LaunchFailed, LaunchRefused
from composer_mesh.services.launch.reach import reached
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.replay.post_reward import LateRewardError
from composer_mesh.services.schedule.signals import CommandSignals, Interrupted
from composer_mesh.services.store.rows import DamagedRecord, StoreMissing
from composer_mesh.services.traces.options import TracesRefused
from composer_mesh.tasks.errors import TaskError
from composer_mesh.tasks.gsm8k_rows import DataError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

REFUSALS = (
    *(ConfigError, ControlRefused, DamagedRecord, DataError, LateRewardError, LaunchRefused),
    *(MissingKey, ReplayRefused, RunDirectoryError, StoreError, StoreMissing, TracesRefused),
    *(TaskError, UsageError, VllmUnavailable),
)

COMMANDS = {
    "check": training.check,
    "verify": inspection.verify_run,
    "launch": clusters.launch,
    "worker": clusters.worker,
    "stop": clusters.stop,
    "join": clusters.join,
    "reward": inspection.reward,
    "traces": inspection.traces,
    "events": inspection.events,
    "scale": inspection.scale,
    "dashboard": inspection.dashboard,
    "report": inspection.report,
    "tree": inspection.tree,
    "stacks": inspection.stacks,
    "query": inspection.query,
    "tui": inspection.tui,
    "new-task": tasks.new_task,
    "make-code-tasks": tasks.make_code_tasks,
    "play": tasks.play,
    "serve": serving.serve,
    "serve-env": tasks.serve_env,
}
LONG_COMMANDS = {
    "train": training.train,
    "ablate": training.ablate,
    "islands": training.islands,
    "island-job": training.island_job,
    "eval": evaluation.evaluate,
    "replay": inspection.replay,
}
"""Commands that record their results when a signal ends them."""

MANY_FILES = (*LONG_COMMANDS, "serve", "serve-env", "play", "worker", "dashboard", "report")
"""Commands that start actors, or open the stores of several runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Without `argv` it uses the process's arguments and handles its signals until it ends.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    signals = CommandSignals()
    try:
        if retired := _refusing(lambda: _checked(words)):
            return retired
        arguments = make_parser().parse_args(words)
        if refused := _refusing(lambda: _startable(arguments.command)):
            return refused
        if arguments.command not in LONG_COMMANDS:
            return _refusing(lambda: _short(arguments, words))
        with signals.caught(for_good=argv is None):
            return _refusing(lambda: LONG_COMMANDS[arguments.command](arguments, signals))
    except KeyboardInterrupt:
        return INTERRUPTED


def _checked(words: Sequence[str]) -> int:
    for word in words:
        if not _is_text(word):
            raise UsageError(
                f"{os.fsencode(word)[:200]!r} is not UTF-8, in which a run stores every name: "
                "rename what it names, or correct it"
            )
    refuse_retired(words)
    return 0


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _startable(command: str) -> int:
    if command in MANY_FILES:
        allow_open_files(command)
    return 0


def _short(arguments: Namespace, words: Sequence[str]) -> int:
    try:
        status = reached(arguments, words)
        return int(COMMANDS[arguments.command](arguments) if status is None else status)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunUnavailable(
            f"{error.filename or arguments.command}: {error.strerror or error}: correct it, or "
            "name another place"
        ) from None


def _refusing(command: Callable[[], int]) -> int:
    """Return a command's exit status; prints the message of an expected error."""
    try:
        return command()
    except REFUSALS as error:
        print(f"composer-mesh: {error}", file=sys.stderr)
        return REFUSED
    except (LaunchFailed, RunUnavailable) as error:
        print(f"composer-mesh: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return FAILED
    except Interrupted as interrupted:
        return interrupted.status
