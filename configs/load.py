"""Loader: a TOML file and `--set` overrides to a validated `Config`, and back to TOML.

Every failure raises `ConfigError`, whose message has a line for each problem that pydantic found:
key, value, bound, repair. Cheap to import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from composer_mesh.configs import plugins, presets
from composer_mesh.configs.errors import ConfigError, one_line, shown
from composer_mesh.configs.hub import GGUF, NO_ID
from composer_mesh.configs.reference import nearest_key
from composer_mesh.configs.regular_files import (
    NotToml,
    TomlRefused,
    check_table,
    parse_toml,
    read_text,
)
from composer_mesh.configs.renamed import with_present_keys
from composer_mesh.configs.schema import Config
from composer_mesh.configs.schema_keys import dotted, is_key, sections_at, sections_of, tag
from composer_mesh.configs.validation import MANY_ERRORS, errors_of

# error type -> (bound, repair), filled from the error's own context
_TEXTS: dict[str, tuple[str, str]] = {
    "greater_than": ("must be above {gt}", "raise it above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "raise it to {ge} or more"),
    "less_than": ("must be below {lt}", "lower it below {lt}"),
    "less_than_equal": ("must be at most {le}", "lower it to {le} or less"),
    "literal_error": ("must be one of {expected}", "write one of these"),
    "int_type": ("must be a whole number", "write it without quotes or a decimal point"),
    "float_type": ("must be a number", "write it without quotes"),
    "finite_number": ("must be a finite number", "write an ordinary number"),
    "string_type": ("must be text", "put it in quotes"),
    "string_too_short": ("must not be empty", "write a name"),
    "string_too_long": ("must have at most {max_length} characters", "shorten it"),
    "too_short": ("must have at least {min_length} entries", "add one"),
    "too_long": ("must have at most {max_length} entries", "remove some"),
    "int_parsing_size": ("must be a number that fits its bounds", "write a smaller one"),
    "string_pattern_mismatch": (
        "must match {pattern}",
        "use letters, digits, dots, dashes and underscores, and begin with a letter or digit",
    ),
    "path_type": ("must be the path of a file or folder", "put it in quotes"),
    "tuple_type": ("must be a list of tables", "write [[{key}]] once for each entry"),
    "model_type": ("must be a table", "write [{key}] and its keys below"),
    "dict_type": ("must be a table", "write [{key}] and its keys below"),
    "bool_type": ("must be true or false", "write it without quotes"),
    "union_tag_invalid": ("type must be one of {expected_tags}", "write one of these"),
    "union_tag_not_found": ("must be a table with a type", 'write [{key}] and type = "…" below'),
}

MOST_WORDED = 20
Table = dict[str, Any]
MOST_PARTS = 16
LONGEST_INDEX = 6


class ExtendedConfig(Config):
    """A config with sections that plugins register, which it has as attributes too."""

    model_config = ConfigDict(extra="allow")


def table_of(target: str, name: str) -> Table:
    """Return the table of a TOML file or a preset, or one of a run `name` for a task alone."""
    if presets.is_config(target):
        return read_table(Path(target))
    return {"run": {"name": name, "steps": 1}, "data": {"task": target}}


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    model_later: bool = False,
    files_gone: bool = False,
) -> Config:
    """Load the config from `path`, or a preset, and the overrides; raise `ConfigError`.

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
    overrides = with_present_keys(table, overrides)
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


def changed_tables(config: Config) -> dict[str, Table]:
    """Return the keys that must be set or differ from their defaults, by the path of their table.

    `replay.teachers[0]` is the first entry of a list of tables.
    """
    changed = _changed(config, config.model_dump(mode="json", exclude_none=True))
    return {path: table for path, table in _flat_tables(changed, ()) if table}


def _flat_tables(table: Table, path: tuple[str | int, ...]) -> Iterator[tuple[str, Table]]:
    inner: list[tuple[tuple[str | int, ...], Table]] = []
    own: Table = {}
    for name, value in table.items():
        if isinstance(value, dict):
            inner.append(((*path, name), value))
        elif value and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            inner += [((*path, name, place), one) for place, one in enumerate(value)]
        else:
            own[name] = value
    yield dotted(path), own
    for below, one in inner:
        yield from _flat_tables(one, below)


def _changed(section: BaseModel, dumped: Mapping[str, Any]) -> Table:
    """Return the keys of a section, and of the sections in it, that are not their defaults."""
    found: Table = {}
    fields = type(section).model_fields
    for name, written in dumped.items():
        value, field = getattr(section, name), fields.get(name)
        if (
            field is not None
            and name != "type"
            and not field.is_required()
            and value == field.get_default(call_default_factory=True)
        ):
            continue
        if isinstance(value, BaseModel):
            found[name] = _changed(value, written)
        elif isinstance(value, tuple) and all(isinstance(one, BaseModel) for one in value):
            found[name] = [_changed(*both) for both in zip(value, written, strict=True)]
        else:
            found[name] = written
    return found


def read_table(path: Path) -> Table:
    """Parse a TOML file, or the preset of that name, without validation; raise `ConfigError`."""
    try:
        return parse_toml(read_text(presets.resolve(path)))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: {presets.repair(path)}") from None
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
        if not isinstance(path, Path) or later:
            continue
        if _is_file(path if path.suffix == GGUF else path / "config.json"):
            continue
        problems.append(
            f"{key} = {shown(str(path))}: must be a model folder that holds config.json, a GGUF "
            f"file, {NO_ID}: correct the path, which is relative to the working directory"
        )
    return problems


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


def describe_all(root: type[BaseModel], error: ValidationError) -> list[str]:
    """Return one line for each problem that pydantic found; only the first are worded."""
    problems = errors_of(error, with_input=True)
    worded = [_describe(root, problem) for problem in problems[:MOST_WORDED]]
    return worded + [dotted(problem["loc"]) for problem in problems[MOST_WORDED:]]


def unknown_key(root: type[BaseModel], path: Sequence[str | int], value: object) -> str:
    """Return the error line of an unknown key, with the keys that may be meant."""
    return (
        f"{dotted(path)} = {shown(value)}: unknown key, must be one the schema has: "
        f"{nearest_key(root, path)}{'' if path[0] in root.model_fields else plugins.missing()}"
    )


def _describe(root: type[BaseModel], problem: Mapping[str, Any]) -> str:
    path, value = _without_tags(root, problem["loc"]), problem["input"]
    context = dict(problem.get("ctx", {}))
    kind = problem["type"]
    if kind == "extra_forbidden":
        if owners := _owners(root, path):
            return _key_of_another_type(path, value, problem["loc"], owners)
        return unknown_key(root, path, value)
    if kind == "missing":
        who = f"type {problem['loc'][-2]!r}" if len(path) < len(problem["loc"]) else "every run"
        return f"{dotted(path)} is not set but {who} needs it: add {_how_to_add(path)}"
    if kind == MANY_ERRORS:
        return f"{problem['msg']}: correct the first of them"
    if kind == "value_error":
        where = dotted(path)
        return f"{where}: {context['error']}" if where else str(context["error"])
    bound, repair = _TEXTS.get(kind, (problem["msg"], "correct it"))
    context["key"] = dotted(path)
    return f"{dotted(path)} = {shown(value)}: {bound.format(**context)}: {repair.format(**context)}"


def _key_of_another_type(
    path: Sequence[str | int], value: object, place: Sequence[str | int], owners: Sequence[str]
) -> str:
    key, chooser = dotted(path), dotted([*path[:-1], "type"])
    return (
        f"{key} = {shown(value)}: {chooser} {place[-2]!r} has no such key, only "
        f"{', '.join(repr(owner) for owner in owners)} has: remove it or change {chooser}"
    )


def _owners(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the `type` values of the table whose sections have the last key."""
    key = str(path[-1])
    sections = sections_at(root, path)
    return [str(tag(s)) for s in sections if len(sections) > 1 and key in s.model_fields]


def _how_to_add(path: Sequence[str | int]) -> str:
    if len(path) == 1:
        return f"a table [{path[0]}]"
    return f"{path[-1]} = … under [{dotted(path[:-1])}]"


def _without_tags(root: type[BaseModel], path: Sequence[str | int]) -> Sequence[str | int]:
    """Return the path as in the file: pydantic adds the `type` that chose a section."""
    found: list[str | int] = []
    sections = [root]
    for part in path:
        fields = [section.model_fields.get(str(part)) for section in sections]
        if isinstance(part, str) and len(sections) > 1 and not any(fields):
            chosen = [s for s in sections if tag(s) == part]
            sections = chosen or [s for s in sections if tag(s) is None] or sections
            continue
        found.append(part)
        if isinstance(part, str):
            sections = [s for field in fields if field for s in sections_of(field.annotation)]
    return found
