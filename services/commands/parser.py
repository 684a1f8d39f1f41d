"""What a command is, the argument parser that `cli` uses, and arguments that commands share.

Commands are registered (`configs.plugins`); only the one that is run is imported.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from composer_mesh.configs import plugins
from composer_mesh.configs.validation import first_error
from composer_mesh.rollouts.budget import LARGEST_USD


@dataclass(frozen=True)
class Command:
    """A command: one line of help, its arguments, and the function that returns the exit status.

    `run` gets the parsed arguments; with `signals` also the `CommandSignals`, for a command that
    records its results when a signal ends it. `many_files` is for one that starts actors or opens
    several runs.
    """

    about: str
    add: Callable[[argparse.ArgumentParser], object]
    run: Callable[..., int]
    signals: bool = False
    many_files: bool = False


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
    about: str, *arguments: Add, signals: bool = False, many_files: bool = False
) -> Callable[[Callable[..., int]], Command]:
    """Return a decorator that makes a function the `run` of a command with these arguments."""

    def add(parser: argparse.ArgumentParser) -> None:
        for one in arguments:
            one(parser)

    return lambda run: Command(about, add, run, signals, many_files or signals)


@cache
def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the command-line parser; its result has the name of the `command`.

    With `only`, a first word, it has that command alone. Otherwise it has all, but commands of
    other packages without their arguments, since a list of names imports none of them. Raises
    RegistrationError for a command that there is not.
    """
    parser = argparse.ArgumentParser(
        prog="composer-mesh",
        description="Train agentic language models in one supervised Monarch mesh.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    if only is not None and not only.startswith("-"):
        shown: dict[str, Command] = {only: plugins.load("commands", only)}
    else:
        shown = {name: one.load() for name, one in plugins.own("commands").items()}
    for name, one in shown.items():
        one.add(commands.add_parser(name, help=one.about, allow_abbrev=False))
    for name in [] if only in shown else plugins.names("commands")[len(shown) :]:
        commands.add_parser(name, help="of another package", allow_abbrev=False)
    return parser


def _version() -> str:
    try:
        return version("composer-mesh")
    except PackageNotFoundError:
        return "of a folder on PYTHONPATH, which is not installed"


add_set = argument(
    "--set",
    action="append",
    default=[],
    metavar="A.B=V",
    help="override one key; V is a TOML value or bare text; may be given many times",
)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="a TOML file, or the name of a preset"
    )
    add_set(parser)


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add where a server listens, and which hosts requests may name."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on; 127.0.0.1 by default"
    )
    parser.add_argument(
        "--port", type=int, default=port, metavar="N", help=f"{port} by default; 0 is a free one"
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
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def dollars(text: str) -> float:
    value = float(text)
    if not 0 <= value <= LARGEST_USD:
        raise argparse.ArgumentTypeError(f"{text} is no number of dollars from 0 on")
    return value
