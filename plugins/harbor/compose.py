"""Reads docker-compose.yaml of a Harbor task: the part of Compose that containers here have.

    the file -> bounded nodes of YAML, without aliases and tags -> variables -> services in order

Keys that need nothing here are ignored and reported. Every other one is refused with its value and
the repair, so that no service runs by other rules than its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from composer_mesh.configs.validation import first_error, validated
from composer_mesh.plugins.harbor.containers.port import ImageSource
from composer_mesh.plugins.harbor.task_toml import LONGEST_SHOWN, HealthcheckTable
from composer_mesh.tasks.errors import UnusableTask, shown

FILE = "docker-compose.yaml"
MAIN = "main"
"""The service that is the agent's container; what it would run is not started, as in Harbor."""
MOST_BYTES = 64 * 1024
MOST_EVENTS = 10_000
"""Values, lists and tables of a file, and their ends."""
MOST_OPENED = 500
"""Lists and tables that begin with a bracket: many in one line take quadratic time."""
DEEPEST = 12
MOST_SERVICES = 16
NULLS = ("", "~", "null", "Null", "NULL")
IGNORED = frozenset(
    (
        *("container_name", "expose", "init", "labels", "logging", "ports", "restart"),
        *("stdin_open", "stop_grace_period", "stop_signal", "tty"),
    )
)
"""Keys of a service that need nothing here: services reach each other, and nobody else them."""
IGNORED_AT_TOP = ("name", "version")
REPAIRS: Mapping[str, str] = {
    "env_file": "write its variables to environment",
    "extends": "write the keys out",
    "network_mode": "remove it: services of a task share one network",
    "networks": "remove it: services of a task share one network",
    "secrets": "write environment with ${NAME}, and NAME to data.options.variables",
    "volumes": "COPY files into the image; services share no files",
}
"""What to write in place of keys that containers here do not have."""
VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::-([^${}]*))?\})?")
TIMES: Mapping[str, float] = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6}
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|us|h|m|s)")
NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"


def _words(given: Any) -> Any:
    """Return the words of a command: no shell reads them, as in Compose."""
    return shlex.split(given) if isinstance(given, str) else given


def _pairs(given: Any) -> Any:
    """Return variables, given as a table or as a list of `NAME=VALUE`."""
    if isinstance(given, list):
        parts = [str(one).partition("=") for one in given]
        given = {name: value if sign else None for name, sign, value in parts}
    if isinstance(given, dict):
        for name, value in given.items():
            if not name or "=" in name:
                raise ValueError(f"{name!r} is no name of a variable: correct it")
            if value is None:
                raise ValueError(
                    f"{name} has no value and would be a variable of this machine: write "
                    f"{name}=${{{name}}}, and {name} to data.options.variables"
                )
    return given


def _seconds(given: Any) -> Any:
    """Return the seconds of a time such as `1m30s`."""
    parts = DURATION.findall(str(given))
    if not parts or "".join(number + unit for number, unit in parts) != given:
        raise ValueError(f"{given!r} is no time: write one such as '500ms', '2s' or '1m30s'")
    return sum(float(number) * TIMES[unit] for number, unit in parts)


def _line(given: Any) -> Any:
    """Return the line that a shell runs for a healthcheck."""
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        return given
    kind, *words = given or [""]
    if kind not in ("CMD", "CMD-SHELL") or not words:
        raise ValueError(
            f"{given} is no check: write a line, or a list that begins with CMD or CMD-SHELL and "
            "a command; a service without a check has no healthcheck"
        )
    return shlex.join(words) if kind == "CMD" else " ".join(words)


def _needed(given: Any) -> Any:
    listed = isinstance(given, list) and all(isinstance(one, str) for one in given)
    return {one: {} for one in given} if listed else given


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Pairs = Annotated[dict[str, str], BeforeValidator(_pairs)]
Time = Annotated[float, BeforeValidator(_seconds)]


class ComposeTable(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BuildTable(ComposeTable):
    """How an image is built."""

    context: str = "."
    dockerfile: str = "Dockerfile"
    args: Pairs = {}


class DependsTable(ComposeTable):
    """What a service waits for."""

    condition: Literal["service_started", "service_healthy"] = "service_started"


class ComposeHealthcheck(ComposeTable):
    """A command that ends with 0 once a service is ready. Defaults are Docker's."""

    test: Annotated[str, BeforeValidator(_line)]
    interval: Time = 30.0
    timeout: Annotated[Time, Field(gt=0)] = 30.0
    start_period: Time = 0.0
    start_interval: Time = 5.0
    retries: Annotated[int, Field(ge=1, le=10_000)] = 3

    def read(self) -> HealthcheckTable:
        """Return it as the healthcheck of a task.toml."""
        return HealthcheckTable(
            command=self.test,
            interval_sec=self.interval,
            timeout_sec=self.timeout,
            start_period_sec=self.start_period,
            start_interval_sec=self.start_interval,
            retries=self.retries,
        )


def _built(given: Any) -> Any:
    return {"context": given} if isinstance(given, str) else given


class ServiceTable(ComposeTable):
    """A service."""

    build: Annotated[BuildTable | None, BeforeValidator(_built)] = None
    image: str | None = None
    command: Words | None = None
    entrypoint: Words | None = None
    environment: Pairs = {}
    working_dir: Annotated[str, Field(pattern=r"^/")] | None = None
    user: str | None = None
    depends_on: Annotated[dict[str, DependsTable], BeforeValidator(_needed)] = {}
    healthcheck: ComposeHealthcheck | None = None


class ComposeFile(ComposeTable):
    """The whole file."""

    services: dict[Annotated[str, Field(pattern=NAME)], ServiceTable]

    @model_validator(mode="after")
    def _services_fit(self) -> Self:
        if len(self.services) > MOST_SERVICES:
            raise ValueError(
                f"there are {len(self.services)} services, and a task may have {MOST_SERVICES}"
            )
        if MAIN not in self.services:
            raise ValueError(f"there is no service {MAIN!r}, which is the agent's container")
        for name, service in self.services.items():
            if name != MAIN and service.build is None and not service.image:
                raise ValueError(f"services.{name} has neither build nor image: write one of them")
            for other, needed in service.depends_on.items():
                if other not in self.services:
                    raise ValueError(f"services.{name}.depends_on names {other!r}, no service")
                checked = self.services[other].healthcheck is not None
                if needed.condition == "service_healthy" and not checked:
                    raise ValueError(
                        f"services.{name} waits until {other!r} is healthy, which has no "
                        "healthcheck: write one, or condition: service_started"
                    )
        return self


@dataclass(frozen=True)
class ComposeService:
    """A service of a task. `waits_for` are those that have to be healthy before it starts.

    None of `image`, `entrypoint`, `command` and `workdir` is what the task.toml or the image says.
    """

    name: str
    image: ImageSource | None = None
    entrypoint: Sequence[str] | None = None
    command: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    waits_for: Sequence[str] = ()
    healthcheck: HealthcheckTable | None = None


@dataclass(frozen=True)
class Compose:
    """The services of a task in the order of their starts, and the keys that were ignored."""

    services: Sequence[ComposeService] = (ComposeService(MAIN),)
    ignored: Sequence[str] = ()

    @property
    def main(self) -> ComposeService:
        """The agent's container."""
        return next(one for one in self.services if one.name == MAIN)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which services reach each other; none where there is only one."""
        return tuple(one.name for one in self.services) if len(self.services) > 1 else ()


def read_compose(folder: Path, variables: Mapping[str, str]) -> Compose:
    """Return the services of a folder `environment`; one without an image if it has no file.

    `variables` are those of this machine that `${NAME}` may take. Raises UnusableTask that states
    the key, its value and the repair.
    """
    file = folder / FILE
    if not file.exists():
        return Compose()
    if not file.is_file():
        raise _wrong("it is no regular file: write one")
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise _wrong(f"it has more than {MOST_BYTES:,} bytes: write a shorter one")
        node = yaml_node(content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"it cannot be read ({error}): correct it") from None
    given = _value(node, variables, "")
    ignored: list[str] = []
    given = _without_ignored(given, ignored)
    try:
        found = validated(ComposeFile, given)
    except ValidationError as error:
        raise _wrong(_refusal(error)) from None
    order = TopologicalSorter({name: one.depends_on for name, one in found.services.items()})
    try:
        services = [_service(name, found.services[name], folder) for name in order.static_order()]
    except CycleError as error:
        raise _wrong(f"services wait for each other: {' -> '.join(error.args[1])}") from None
    return Compose(tuple(services), tuple(ignored))


def _wrong(why: str) -> UnusableTask:
    return UnusableTask(f"environment/{FILE}: {why}")


def yaml_node(text: str) -> Any:
    """Return a YAML document; raise UnusableTask for what is none, or grows or nests once read."""
    try:
        _refuse_hostile(text)
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except UnusableTask:
        raise
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # escapes are numbers
        said = " ".join(str(error).split())
        raise _wrong(f"it cannot be read as YAML ({said[:300]}): correct it") from None


def _refuse_hostile(text: str) -> None:
    depth, opened = 0, text.count("[") + text.count("{")
    if opened > MOST_OPENED:
        raise _wrong(f"it has {opened:,} opening brackets, and may have {MOST_OPENED}: indent")
    for count, event in enumerate(yaml.parse(text, Loader=yaml.BaseLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise _wrong(f"line {line} has the alias *{event.anchor[:40]}: write the value out")
        if getattr(event, "tag", None) is not None:
            raise _wrong(f"line {line} has the tag {event.tag[:40]!r}: remove it")
        if depth > DEEPEST or count > MOST_EVENTS:
            raise _wrong(
                f"line {line} is the end of {DEEPEST} levels or {MOST_EVENTS:,} values, which are "
                "the most: write a shorter file"
            )


def _value(node: Any, variables: Mapping[str, str], where: str) -> Any:
    """Return tables, lists, texts and None; every text has its variables replaced."""
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, one in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in found:
                raise _wrong(f"{where or 'the file'} has a key twice, or one that is no text")
            inner = f"{where}.{key.value[:40]}".lstrip(".")
            found[key.value] = _value(one, variables, inner)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, variables, where) for one in node.value]
    if node is None or (node.style is None and node.value in NULLS):
        return None
    return _replaced(node.value, variables, where)


def _replaced(text: str, variables: Mapping[str, str], where: str) -> str:
    """Return a text with `${NAME}`, `${NAME:-default}` and `$$` in it replaced."""
    encoded = text.encode(errors="ignore")
    if b"\0" in encoded or encoded.decode() != text:
        raise _wrong(f"{where} has a NUL or half of a character, which no program takes: remove it")

    def value(found: re.Match[str]) -> str:
        dollar, name, default = found.groups()
        if dollar is not None:
            return "$"
        if name is None:
            raise _wrong(
                f"{where} is {shown(repr(text), LONGEST_SHOWN)}: variables are ${{NAME}} and "
                "${NAME:-default}, and a dollar is $$"
            )
        if name not in variables and default is None:
            raise _wrong(
                f"{where} takes ${{{name}}} of this machine, which data.options.variables does not "
                "name, or which is not set: export it and name it there"
            )
        return str(variables.get(name, default))

    return VARIABLE.sub(value, text)


def _without_ignored(given: Any, ignored: list[str]) -> Any:
    """Return a file without keys that need nothing or have no value; note the former."""
    if not isinstance(given, dict):
        return given
    kept = dict(_kept(given, IGNORED_AT_TOP, "", ignored))
    services = kept.get("services")
    if isinstance(services, dict):
        kept["services"] = {
            name: dict(_kept(one or {}, IGNORED, f"services.{name}.", ignored))
            if isinstance(one, dict | None)
            else one
            for name, one in services.items()
        }
    return kept


def _kept(
    table: Mapping[str, Any], needless: Sequence[str] | frozenset[str], at: str, ignored: list[str]
) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if key in needless or key.startswith("x-"):
            ignored.append(f"{at}{key}")
        elif value is not None:
            yield key, value


def _refusal(error: ValidationError) -> str:
    first = first_error(error, with_input=True)
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    value = shown(repr(first.get("input")), LONGEST_SHOWN)
    if first["type"] == "extra_forbidden":
        repair = REPAIRS.get(str(first["loc"][-1]), "remove it, or leave the task out of data.path")
        return f"{where} is {value}, which containers here do not have: {repair}"
    said = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where + ': ' if where else ''}{said}"
    return f"{where or 'the file'} is {value}: {said}, so correct it"


def _service(name: str, table: ServiceTable, folder: Path) -> ComposeService:
    image = ImageSource(table.image) if table.image else None
    if table.build is not None:
        image = _image(name, table.build, folder)
    healthy = [
        one for one, needed in table.depends_on.items() if needed.condition == "service_healthy"
    ]
    return ComposeService(
        name,
        image,
        table.entrypoint,
        table.command,
        table.environment,
        table.working_dir,
        table.user,
        tuple(healthy),
        None if table.healthcheck is None else table.healthcheck.read(),
    )


def _image(name: str, table: BuildTable, folder: Path) -> ImageSource:
    """Return what is built, from files below the folder alone."""
    root = folder.resolve()
    context = (root / table.context).resolve()
    file = (context / table.dockerfile).resolve()
    if not context.is_relative_to(root) or not file.is_relative_to(context) or not file.is_file():
        raise _wrong(
            f"services.{name}.build has context {table.context[:80]!r} and dockerfile "
            f"{table.dockerfile[:80]!r}, which is no file in environment/: copy it there"
        )
    relative = file.relative_to(context).as_posix()
    return ImageSource(build=context, dockerfile=relative, arguments=table.args)
