"""Loader: a TOML file and `--set` overrides to a validated `Config`, and back to TOML.

Every failure raises `ConfigError`. Cheap to import.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

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
from composer_mesh.configs.schema import Config
from composer_mesh.configs.toml import NotToml, TomlRefused, check_table, parse_toml, read_text

Table = dict[str, Any]
MOST_PARTS = 16
LONGEST_INDEX = 6


def load_config(path: Path, overrides: Sequence[str] = (), *, model_later: bool = False) -> Config:
    """Load the config from `path` and the overrides; raise `ConfigError`.

    Relative paths in it are relative to the working directory. With `model_later` the model's
    folder may be missing if the config declares its sizes.
    """
    return resolve_config(read_table(path), overrides, str(path), model_later=model_later)


def resolve_config(
    table: Table, overrides: Sequence[str], source: str, *, model_later: bool = False
) -> Config:
    """Validate a table with overrides; the overrides modify the table in place.

    Error messages start with `source`.
    """
    problems = [line for text in overrides if (line := _override(table, text))]
    if problems:
        raise _error(source, problems)
    try:
        check_table(table)
    except TomlRefused as error:
        raise _error(source, [f"it {error}"]) from None
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        raise _error(source, describe_all(Config, error)) from None
    if problems := _missing_files(config, model_later):
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


def _override(table: Table, text: str) -> str | None:
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
    if not is_key(Config, path):
        return f"--set {unknown_key(Config, path, given)}"
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
    problems = []
    data, sdpo = config.data.path, config.sdpo
    models = [("policy.path", config.policy.path, config.policy.sizes)]
    if sdpo.on and (other := sdpo.teacher_model) is not None:
        models.append(("sdpo.teacher_model.path", other.path, other.sizes))
    if data is not None and not _is_file(data):
        problems.append(
            f"data.path = {shown(str(data))}: no such file in {_cwd()}, or no regular one: "
            "correct the path, which is relative to the working directory"
        )
    for key, folder, sizes in models:
        later = model_later and sizes is not None
        if folder is not None and not later and not _is_file(folder / "config.json"):
            problems.append(
                f"{key} = {shown(str(folder))}: must be a model folder that holds config.json: "
                "correct the path, which is relative to the working directory"
            )
    return problems


def _is_file(path: Path) -> bool:
    """Return whether a regular file is there; False also where the folder may not be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "a working directory that is gone"
