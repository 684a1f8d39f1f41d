"""What a command is, the argument parser that `cli` uses, and arguments that commands share.

Commands are registered (`configs.plugins`); only the one that is run is imported. An optional RUN,
`--output` and `--json` are the same in every command: `RUN`, `output`, `as_json`.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import ValidationError

from composer_mesh.configs import plugins
from composer_mesh.configs.errors import did_you_mean, nearest
from composer_mesh.configs.installed import installed_version
from composer_mesh.configs.validation import first_error
from composer_mesh.rollouts.budget import LARGEST_USD
from composer_mesh.services.directory.claim import RUNS, output_path

PROGRAM = "composer-mesh"
Group = Literal["train", "runs", "configs", "tasks", "servers", "others"]
GROUPS: Mapping[Group, str] = {
    "train": "train and evaluate",
    "runs": "inspect and control a run",
    "configs": "configs",
    "tasks": "data and tasks",
    "servers": "servers and clusters",
    "others": "others",
}
"""Titles of the groups of commands, in the order of the help."""
EXAMPLES = {
    "train quickstart": "train a small model on this machine",
    "tree --watch": "watch the newest run while it trains",
    "traces --failed": "list the rollouts that failed",
    "explain trainer.lr": "explain a key of a config",
    "train quickstart --resume": "continue a run that was stopped",
}
USAGE_ERROR = 2


@dataclass(frozen=True)
class Command:
    """A command: one line of help, its arguments, and the function that returns the exit status.

    `run` gets the parsed arguments; with `signals` also the `CommandSignals`, for a command that
    records its results when a signal ends it. `many_files` is for one that starts actors or opens
    several runs. `example` has the words after `composer-mesh`. A `hidden` command is one that
    another command runs: no list has it.
    """

    about: str
    add: Callable[[argparse.ArgumentParser], object]
    run: Callable[..., int]
    signals: bool = False
    many_files: bool = False
    group: Group = "others"
    example: str = ""
    hidden: bool = False


Add = Callable[[argparse.ArgumentParser], object]
"""Adds something to a parser: an argument, or several."""


def argument(*names: str, **options: Any) -> Add:
    """Return what adds one argument, given as for `ArgumentParser.add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


def one_of(*arguments: Add) -> Add:
    """Return what adds arguments of which a command line may have one."""

    def add(parser: argparse.ArgumentParser) -> None:
        group: Any = parser.add_mutually_exclusive_group()
        for one in arguments:
            one(group)

    return add


def command(
    about: str,
    *arguments: Add,
    signals: bool = False,
    many_files: bool = False,
    group: Group = "others",
    example: str = "",
    hidden: bool = False,
) -> Callable[[Callable[..., int]], Command]:
    """Return a decorator that makes a function the `run` of a command with these arguments."""

    def add(parser: argparse.ArgumentParser) -> None:
        for one in arguments:
            one(parser)

    files = many_files or signals
    return lambda run: Command(about, add, run, signals, files, group, example, hidden)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a line or two: what is wrong, and an example of what is right."""

    example = ""
    of_one_command = False
    _parsing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options and positional arguments in any order.

        Refuses unknown options, with the options that may be meant.
        """
        if not self.of_one_command or self._parsing:
            return super().parse_known_args(args, namespace)
        self._parsing = True  # `parse_known_intermixed_args` calls this method
        try:
            found, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._parsing = False
        if unknown:
            options = re.findall(r"--[a-z][a-z-]*", self.format_help())
            word = unknown[0].partition("=")[0]
            near = nearest(word, options) if word.startswith("--") else []
            question = f": {did_you_mean(near)}" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)[:200]}{question}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print an error without the usage, which may fill a screen, and exit with status 2."""
        lines = [f"{self.prog}: {message}", f"{self.prog} --help explains its arguments"]
        if self.example:
            lines[1] += f"; an example: {PROGRAM} {self.example}"
        self.exit(USAGE_ERROR, "\n".join(lines) + "\n")


@cache
def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the command-line parser; its result has the name of the `command`.

    With `only`, a first word, it has that command alone. Otherwise it has all, but commands of
    other packages without their arguments, since a list of names imports none of them. Raises
    RegistrationError for a command that there is not.
    """
    if only is not None and not only.startswith("-"):
        found: dict[str, Command] = {only: plugins.load("commands", only)}
    else:
        found = {name: one.load() for name, one in plugins.own("commands").items()}
    others = [] if only in found else plugins.names("commands")[len(found) :]
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [ARGUMENTS]",
        description="Train agentic language models in one supervised Monarch mesh.",
        epilog=_overview(found, others),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = installed_version(PROGRAM) or "of a folder on PYTHONPATH, which is not installed"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", prog=PROGRAM, help=argparse.SUPPRESS
    )
    for name, one in found.items():
        own = commands.add_parser(
            name,
            description=f"{one.about[:1].upper()}{one.about[1:]}.",
            epilog=f"example:\n  {PROGRAM} {one.example}" if one.example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        own.example, own.of_one_command = one.example, True
        one.add(own)
    for name in others:
        commands.add_parser(name, allow_abbrev=False)
    return parser


def _overview(found: Mapping[str, Command], others: Sequence[str]) -> str:
    """Return the list of commands by group, and examples."""
    lines: list[str] = []
    for group, title in GROUPS.items():
        shown = {
            name: one.about for name, one in found.items() if one.group == group and not one.hidden
        }
        if group == "others":
            shown |= dict.fromkeys(others, "a command of another package")
        if shown:
            lines += [f"{title}:", *_columns(shown), ""]
    examples = {f"{PROGRAM} {words}": about for words, about in EXAMPLES.items()}
    return "\n".join([*lines, "examples:", *_columns(examples)])


def _columns(rows: Mapping[str, str]) -> Iterable[str]:
    width = max(map(len, rows))
    return (f"  {name:<{width}}  {about}" for name, about in rows.items())


RUN = argument(
    "run",
    nargs="?",
    type=Path,
    metavar="RUN",
    help=f"run directory (default: the newest in {RUNS}/)",
)
"""The run that a command is about; `cli` fills in the newest one."""


def output(text: str, metavar: str = "DIR") -> Add:
    """Return the option of the place that a command writes; `text` says what is written."""
    return argument("--output", type=output_path, metavar=metavar, help=text)


def as_json(text: str) -> Add:
    """Return the option by which a command prints JSON; `text` says what one object is."""
    return argument("--json", action="store_true", help=f"print {text} as JSON")


add_set = argument(
    "--set",
    action="append",
    default=[],
    metavar="A.B=V",
    help="override one key; V is a TOML value or bare text; may be given many times",
)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="TOML file, or name of a preset"
    )
    add_set(parser)


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add where a server listens, and which hosts requests may name."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=port,
        metavar="N",
        help=f"port to listen on; 0 takes a free one (default: {port})",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host that requests may name in addition to --host; may be given many times",
    )
    parser.add_argument(
        "--any-address", action="store_true", help="listen on public addresses too, with a token"
    )


def add_listen(parser: argparse.ArgumentParser, port: int) -> None:
    """Add where a server listens, who may reach it, and the token for those."""
    add_address(parser, port)
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with the token that clients send; needed beyond loopback",
    )


def first_refused_option(error: ValidationError) -> str:
    """Return what is wrong with the first refused option of a server."""
    first = first_error(error, with_input=True)
    name = str(first["loc"][0]).removesuffix("_s").replace("_", "-")
    return f"--{name} is {first['input']!r}: {first['msg']}"


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def dollars(text: str) -> float:
    value = float(text)
    if not 0 <= value <= LARGEST_USD:
        raise argparse.ArgumentTypeError(f"{text} is not a number of dollars from 0 on")
    return value
