"""Loader: a TOML file and `--set` overrides to a validated `Config`, and back to TOML.

Every failure raises `ConfigError`. Cheap to import.

TOML that anyone may have written: bounded before it is parsed, and checked after.

Raises `TomlRefused`, with the line or the key in its message. Nothing here knows the schema.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, create_model

from composer_mesh.configs import plugins
from composer_mesh.configs.errors import (
    MOST_WORDED,
    ConfigError,
    describe_all,
    dotted,
    is_key,
    one_line,
    shown,
    unknown_key,
)
from composer_mesh.configs.hub import GGUF, NO_ID
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config, ExtendedConfig

LARGEST_FILE = 256 * 1024
MOST_DOTS = 64
"""Dots outside quotes of one line: a key of thousands of parts takes a parser minutes."""
DEEPEST = 20
LARGEST_INTEGER = 2**63 - 1
"""TOML's own bound of integers."""

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*("|\\?\Z)|\'[^\']*\'', re.DOTALL)
_LITERAL = re.compile(r"'[^']*'")
_COMMENT = re.compile(r"#.*")
_MANY_DIGITS = re.compile(r"[0-9_]{1000}")


class TomlRefused(Exception):
    """The text is not TOML that is read; the message says where and what to do."""


class NotToml(TomlRefused):
    """The text breaks the grammar of TOML."""


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8 text; raise OSError or `TomlRefused`. Never waits for a pipe."""
    try:
        return read_regular(path, LARGEST_FILE).decode()
    except UnicodeDecodeError as error:
        raise TomlRefused(
            f"cannot be read as text ({error}): give a readable UTF-8 TOML file"
        ) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML into tables; raise `TomlRefused`."""
    _refuse_long_keys(text)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotToml(f"is not valid TOML: {error}: correct that line") from None
    except RecursionError:
        raise TomlRefused(
            f"has brackets inside each other around line {_deepest_line(text)}, at most {DEEPEST} "
            "are read: flatten that value"
        ) from None
    except ValueError:  # Python's limit of digits
        raise TomlRefused(
            f"has a number of thousands of digits in line {_longest_number(text)}, at most 19 are "
            "read: write a smaller number"
        ) from None
    check_table(table)
    return table


def check_table(table: dict[str, Any]) -> None:
    """Raise `TomlRefused` for tables inside each other too deep, or an integer too large."""
    for depth, path, value in _values(table):
        if depth >= DEEPEST and isinstance(value, dict | list) and value:
            raise TomlRefused(
                f"has more than {DEEPEST} tables inside each other at the key {_joined(path)}: "
                "flatten them"
            )
        if type(value) is int and abs(value) > LARGEST_INTEGER:
            raise TomlRefused(
                f"has an integer of {value.bit_length()} bits at the key {_joined(path)}, which "
                "must be between -2**63 and 2**63: write a smaller number"
            )


def _refuse_long_keys(text: str) -> None:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") <= MOST_DOTS:
            continue
        dots = _COMMENT.sub("", _QUOTED.sub(_unquoted, line)).count(".")
        if dots > MOST_DOTS:
            raise TomlRefused(
                f"has {dots} dots in line {number}, at most {MOST_DOTS} are read: break the line "
                "or shorten its key"
            )


def _unquoted(quoted: re.Match[str]) -> str:
    """Return the part of a quoted text that counts: none, or all if its line does not close it."""
    return _LITERAL.sub("", quoted[0]) if quoted[1] in ("", "\\") else ""


def _values(table: dict[str, Any]) -> Iterator[tuple[int, tuple[str, ...], Any]]:
    """Yield depth, path and value of all that a table contains, without recursion."""
    left: list[tuple[int, tuple[str, ...], Any]] = [(0, (), table)]
    while left:
        depth, path, value = left.pop()
        yield depth, path, value
        if isinstance(value, dict):
            left += [(depth + 1, (*path, str(name)), one) for name, one in value.items()]
        elif isinstance(value, list):
            left += [(depth + 1, path, one) for one in value]


def _joined(path: tuple[str, ...]) -> str:
    return ascii(".".join(part[:40] for part in path[:5]))


def _deepest_line(text: str) -> int:
    depth, deepest, found = 0, 0, 1
    for number, line in enumerate(text.split("\n"), start=1):
        depth += sum(map(line.count, "[{"))
        if depth > deepest:
            deepest, found = depth, number
        depth = max(0, depth - sum(map(line.count, "]}")))
    return found


def _longest_number(text: str) -> int:
    match = _MANY_DIGITS.search(text)
    return text.count("\n", 0, match.start() if match else 0) + 1


Table = dict[str, Any]
MOST_PARTS = 16
LONGEST_INDEX = 6


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    model_later: bool = False,
    files_gone: bool = False,
) -> Config:
    """Load the config from `path` and the overrides; raise `ConfigError`.

    Relative paths in it are relative to the working directory. With `model_later` the model's
    folder may be missing if the config declares its sizes; with `files_gone` whatever it names, for
    a run that is only read.
    """
    table = read_table(path)
    return resolve_config(
        table, overrides, str(path), model_later=model_later, files_gone=files_gone
    )


def resolve_config(
    table: Table,
    overrides: Sequence[str],
    source: str,
    *,
    model_later: bool = False,
    files_gone: bool = False,
) -> Config:
    """Validate a table with overrides; the overrides modify the table in place.

    Error messages start with `source`.
    """
    schema = _schema([*table, *(text.partition(".")[0].strip() for text in overrides)])
    problems = [line for text in overrides if (line := _override(schema, table, text))]
    if problems:
        raise _error(source, problems)
    try:
        check_table(table)
    except TomlRefused as error:
        raise _error(source, [f"it {error}"]) from None
    try:
        config = schema.model_validate(table)
    except ValidationError as error:
        raise _error(source, describe_all(schema, error)) from None
    if schema is not Config:
        config = ExtendedConfig.model_construct(**dict(config))  # its class can be pickled
    if not files_gone and (problems := _missing_files(config, model_later)):
        raise _error(source, problems)
    return config


def dump_toml(config: Config) -> str:
    """Serialize the resolved config to TOML; `load_config` restores it."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def read_table(path: Path) -> Table:
    """Parse a TOML file without validation; raise `ConfigError` if it is not valid TOML."""
    try:
        return parse_toml(read_text(path))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: check the name, or copy a preset such as "
            "configs/quickstart.toml"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path} cannot be read as text ({reason}): give a readable UTF-8 TOML file"
        ) from None
    except TomlRefused as error:
        raise ConfigError(f"{path} {error}") from None


def _error(source: str, problems: Sequence[str]) -> ConfigError:
    lines = [one_line(problem) for problem in problems[:MOST_WORDED]]
    if len(problems) == 1:
        return ConfigError(f"{source}: {lines[0]}")
    if left := len(problems) - len(lines):
        lines.append(f"and {left} more: correct these first")
    return ConfigError("\n  ".join([f"{source}: {len(problems)} problems", *lines]))


def _schema(names: Iterable[str]) -> type[Config]:
    """Return the schema with those of the sections that plugins register."""
    sections = {
        name: (plugins.load("config_sections", name), ...)
        for name in names
        if name not in Config.model_fields and plugins.find("config_sections", name)
    }
    return create_model("Config", __base__=Config, **sections) if sections else Config  # type: ignore[call-overload]


def _override(schema: type[Config], table: Table, text: str) -> str | None:
    """Apply one `a.b=v` to the table; return the error line, or None."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > MOST_PARTS:
        return f"--set {text[:80]!r}: must be KEY.PATH=VALUE: write for example --set run.steps=3"
    path = [_part(part) for part in parts]
    try:
        given = _value(value)
    except TomlRefused as error:
        return f"--set {dotted(path)}: the value {error}"
    if not is_key(schema, path):
        return f"--set {unknown_key(schema, path, given)}"
    try:
        _put(table, path, given)
    except (TypeError, KeyError, IndexError):
        return (
            f"--set {dotted(path)} = {shown(value)}: the file has no table at {dotted(path[:-1])}: "
            "add it to the file, or override a key that is there"
        )
    return None


def _part(text: str) -> str | int:
    """Return a part of a key path; digits are list indices: replay.teachers.0.error_rate."""
    digits = text.isascii() and text.isdecimal() and len(text) <= LONGEST_INDEX
    return int(text) if digits else text


def _value(text: str) -> object:
    """Parse a TOML value; return the text itself if it is not one; raise `TomlRefused`."""
    try:
        table = parse_toml(f"value = {text}")
    except NotToml:
        return text
    return table["value"] if len(table) == 1 else text


def _put(table: Any, path: Sequence[str | int], value: object) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {}) if isinstance(table, dict) else table[part]
    table[path[-1]] = value


def _missing_files(config: Config, model_later: bool) -> list[str]:
    """Return a line for each path that is not there; an id is looked for by the command."""
    problems = []
    data, sdpo = config.data.path, config.sdpo
    models = [("policy.path", config.policy.path, config.policy.sizes)]
    if sdpo.on and (other := sdpo.teacher_model) is not None:
        models.append(("sdpo.teacher_model.path", other.path, other.sizes))
    if isinstance(data, Path) and not _is_file(data, folders=True):
        problems.append(
            f"data.path = {shown(str(data))}: no such file in {_cwd()}, or no regular one: "
            f"correct the path, which is relative to the working directory, {NO_ID}"
        )
    for key, path, sizes in models:
        later = model_later and sizes is not None
        if not isinstance(path, Path) or later or _is_model(path):
            continue
        problems.append(
            f"{key} = {shown(str(path))}: must be a model folder that holds config.json, a GGUF "
            f"file, {NO_ID}: correct the path, which is relative to the working directory"
        )
    return problems


def _is_model(path: Path) -> bool:
    return _is_file(path if path.suffix == GGUF else path / "config.json")


def _is_file(path: Path, *, folders: bool = False) -> bool:
    """Return whether a regular file is there; False also where the folder may not be read."""
    try:
        return path.is_file() or (folders and path.is_dir())
    except OSError:
        return False


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "a working directory that is gone"
