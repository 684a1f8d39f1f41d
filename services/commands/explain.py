"""The command that explains keys of a config: type, bounds, default, and what each is for."""

import argparse
import textwrap

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.reference import Key, explained, keys, nearest_key
from composer_mesh.configs.schema import Config
from composer_mesh.services.commands.parser import argument, command

WIDTH = 100


@command(
    "explain keys of a config: type, bounds, default",
    argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="key as in --set, such as trainer.lr, or a table (default: all keys)",
    ),
    group="configs",
    example="explain trainer.lr",
)
def explain(arguments: argparse.Namespace) -> int:
    """Print a key, or a table and its keys; the tables of a config if none is named."""
    key: str | None = arguments.key
    if key is None:
        found = [one for one in keys(Config) if "." not in one.path]
    elif not (found := explained(Config, key)):
        raise ConfigError(f"no key {key[:80]!r}: {nearest_key(Config, key.split('.'))}")
    for one in found:
        print(*_lines(one), sep="\n")
    return 0


def _lines(key: Key) -> list[str]:
    types = ", ".join(key.types)
    only = f" (type {types})" if types and not key.path.endswith(".type") else ""
    indent = " " * 4
    text = textwrap.wrap(key.text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [f"{key.path}{only}: {key.value}", *text]
