"""Arguments and types of arguments that several commands share."""

import argparse
from pathlib import Path

from pydantic import ValidationError

from composer_mesh.configs.validation import first_error
from composer_mesh.rollouts.budget import LARGEST_USD
from composer_mesh.services.commands.parser import argument

add_set = argument(
    "--set",
    action="append",
    default=[],
    metavar="A.B=V",
    help="override one key; V is a TOML value or bare text; may be given many times",
)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
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
