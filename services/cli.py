"""The command line: parses arguments; invalid ones give one message and status 2.

Commands are registered (`configs.plugins`); those of the core are in `commands`. `launch.handle`
runs a command about a run whose controller is on another machine on that machine.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from composer_mesh.actors.engines.vllm_settings import VllmUnavailable
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs import plugins
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.user_code import CustomFunctionError, with_frame
from composer_mesh.services.checks.accepting import UsageError, allow_open_files
from composer_mesh.services.checks.keys import MissingKey
from composer_mesh.services.commands.parser import Command, make_parser
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.control import ControlRefused
from composer_mesh.services.directory.status import NotRunning, RunUnavailable, run_or_newest
from composer_mesh.services.inspection.ending import ending_of
from composer_mesh.services.launch.handle import reached
from composer_mesh.services.launch.ports import LaunchFailed, LaunchRefused
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.replay.post_reward import LateRewardError
from composer_mesh.services.schedule.stopping import CommandSignals, Interrupted
from composer_mesh.services.store.rows import DamagedRecord, StoreMissing
from composer_mesh.services.traces.options import TracesRefused
from composer_mesh.tasks.errors import DataError, TaskError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

REFUSALS = (
    *(ConfigError, ControlRefused, CustomFunctionError, DamagedRecord, DataError),
    *(LateRewardError, LaunchRefused),
    *(MissingKey, ReplayRefused, RunDirectoryError, StoreError, StoreMissing, TracesRefused),
    *(TaskError, UsageError, VllmUnavailable, plugins.PluginFailed, plugins.RegistrationError),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Without `argv` it uses the process's arguments and handles its signals until it ends.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    signals = CommandSignals()
    try:
        return _refusing(lambda: _run(words, signals, for_good=argv is None))
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(words: Sequence[str], signals: CommandSignals, for_good: bool) -> int:
    for word in words:
        if not _is_text(word):
            raise UsageError(
                f"{os.fsencode(word)[:200]!r} is not UTF-8, in which a run stores every name: "
                "rename what it names, or correct it"
            )
    if not words:
        make_parser().print_help(sys.stderr)
        return REFUSED
    arguments = make_parser(*words[:1]).parse_args(words)
    words = _with_a_run(arguments, words)
    command: Command = plugins.load("commands", arguments.command)
    if command.many_files:
        allow_open_files(arguments.command)
    if not command.signals:
        return _short(command, arguments, words)
    with signals.caught(for_good):
        return _refusing(lambda: command.run(arguments, signals))


def _with_a_run(arguments: Namespace, words: Sequence[str]) -> Sequence[str]:
    """Return the words with the newest run, where they have none and the command needs one."""
    if getattr(arguments, "run", Path()) is not None:
        return words
    arguments.run = run_or_newest(None)
    print(f"composer-mesh: the newest run is {arguments.run}", file=sys.stderr)
    return [words[0], str(arguments.run), *words[1:]]


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(command: Command, arguments: Namespace, words: Sequence[str]) -> int:
    try:
        status = reached(arguments, words)
        return int(command.run(arguments) if status is None else status)
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
        print(f"composer-mesh: {with_frame(error)}", file=sys.stderr)
        return REFUSED
    except (LaunchFailed, RunUnavailable) as error:
        ended = ending_of(error.run) if isinstance(error, NotRunning) else None
        lines = list(ended.lines()) if ended else [str(error)]
        print("composer-mesh: " + "\n  ".join(lines), file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return FAILED
    except Interrupted as interrupted:
        return interrupted.status
