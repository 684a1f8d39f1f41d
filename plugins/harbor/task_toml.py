"""The file task.toml of a Harbor task: the public format, schema versions 1.0 to 1.4.

Older keys (`version`, `memory`, `storage`, `allow_internet`) are read as the newer ones. Keys that
the format does not have are ignored and reported. What the format has and containers here do not
offer is stated by `unsupported`, so that no task is played by other rules than its own.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from composer_mesh.configs.validation import first_error, validated
from composer_mesh.plugins.harbor.allowlist import Allowlist
from composer_mesh.tasks.errors import UnusableTask, shown

NEWEST = (1, 4)
"""The newest schema version that is read."""
LONGEST_SHOWN = 80
SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
LOOPBACKS = ("localhost", "127.0.0.1")
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}")
HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,4000}")
CREDENTIAL = re.compile(r"authorization|cookie|credential|key|secret|token|password", re.I)
STEP_NAME = r"^[^<>:\"/\\|?*\x00-\x1f\x7f]*[^<>:\"/\\|?*\x00-\x1f\x7f. ]$"

Seconds = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Megabytes = Annotated[int, Field(gt=0)]
NetworkMode = Literal["public", "no-network", "allowlist"]
User = str | int
Variables = dict[str, str]


class Table(BaseModel):
    """A table of the file; `older` are keys that are read as others."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)
    older: ClassVar[frozenset[str]] = frozenset()


class Phase(Table):
    """What [agent], [verifier] and [environment] say of the network."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_list(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError(
                f"allowed_hosts is set but network_mode is {self.network_mode or 'not set'}: set "
                'network_mode to "allowlist", or remove allowed_hosts'
            )
        Allowlist.of(self.allowed_hosts or [])
        return self


@dataclass(frozen=True)
class Network:
    """What a phase of a task may reach: everything, nothing, or the hosts of a list."""

    mode: NetworkMode = "public"
    hosts: tuple[str, ...] = ()


NO_NETWORK = Network("no-network")


def network_of(*phases: Phase) -> Network:
    """Return the network of the first table that states one; "public" where none does."""
    stated = next((one for one in phases if one.network_mode is not None), Phase())
    return Network(stated.network_mode or "public", tuple(stated.allowed_hosts or ()))


class AuthorTable(Table):
    """An author of a task."""

    name: str
    email: str | None = None


class PackageTable(Table):
    """[task]: what the task is called."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][\w.-]*/[A-Za-z0-9_-][\w.-]*$")]
    version: str | None = None
    description: str = ""
    authors: list[AuthorTable] = []
    keywords: list[str] = []


class AgentTable(Phase):
    """[agent]: its time in seconds, and its user."""

    timeout_sec: Seconds | None = None
    user: User | None = None


class HealthcheckTable(Table):
    """[environment.healthcheck]: a command that ends with 0 once the container is ready."""

    command: str
    interval_sec: NotNegative = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: NotNegative = 0.0
    start_interval_sec: NotNegative = 5.0
    retries: Annotated[int, Field(ge=1)] = 3


class TpuTable(Table):
    """[environment.tpu]."""

    type: str
    topology: str


class McpServerTable(Table):
    """[[environment.mcp_servers]]: a server whose tools the agent may call."""

    name: Annotated[str, Field(min_length=1)]
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @property
    def host(self) -> str:
        """The host of its URL; empty for a program."""
        return urlsplit(self.url or "").hostname or ""

    @property
    def is_inside(self) -> bool:
        """Whether its URL names the container's own loopback."""
        return self.host in LOOPBACKS

    @field_validator("transport", mode="before")
    @classmethod
    def _alias(cls, value: Any) -> Any:
        return "streamable-http" if value == "http" else value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"{needed} is not set but transport is {self.transport!r}: set it")
        if self.url and not _is_url(self.url):
            raise ValueError(
                f"url is {shown(repr(self.url), LONGEST_SHOWN)}: write http://HOST:PORT/PATH, or "
                "https, without a user"
            )
        for name, value in self.headers.items():
            if not HEADER.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
                raise ValueError(
                    f"headers has {name[:40]!r}, which is no header of HTTP: correct it"
                )
            if CREDENTIAL.search(name) and "${" not in value:
                raise ValueError(
                    f"headers has a value for {name!r}, which is a credential: write ${{NAME}}, "
                    "and NAME to data.options.variables"
                )
        return self


def _is_url(text: str) -> bool:
    try:
        found = urlsplit(text)
        port = found.port != 0
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and " " not in text
    return (
        plain
        and port
        and found.scheme in ("http", "https")
        and bool(found.hostname)
        and (found.username is None)
    )


class EnvironmentTable(Phase):
    """[environment]: the container. Sizes are in MB; None is the back end's default."""

    older: ClassVar[frozenset[str]] = frozenset({"memory", "storage", "allow_internet"})

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: list[str] | None = None
    tpu: TpuTable | None = None
    mcp_servers: list[McpServerTable] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        table = dict(given)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if (text := table.pop(old, None)) is not None:
                size = _megabytes(old, text)
                if table.setdefault(new, size) != size:
                    raise ValueError(f"{old} is {text!r} but {new} is {table[new]!r}: keep one")
        internet = table.pop("allow_internet", None)
        if internet is not None and not isinstance(internet, bool):
            raise ValueError(f"allow_internet is {internet!r}: write true or false")
        if internet is not None and "network_mode" not in table:
            table["network_mode"] = "public" if internet else "no-network"
        if isinstance(table.get("os"), str):
            table["os"] = table["os"].lower()
        return table


class CollectTable(Table):
    """[[verifier.collect]]: a command that runs after the agent and before artifacts are taken."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: User | None = None


class VerifierTable(Phase):
    """[verifier]: how tests are run."""

    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = []

    @model_validator(mode="after")
    def _one_mode(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(
                'environment_mode is "shared" but verifier.environment is set: remove one of them'
            )
        return self

    @property
    def separate(self) -> bool:
        """Whether tests run in a container of their own."""
        if self.environment_mode is None:
            return self.environment is not None
        return self.environment_mode == "separate"


class ArtifactTable(Table):
    """A path of the container that a separate verifier gets."""

    source: Annotated[str, Field(min_length=1)]
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _inside(cls, value: str) -> str:
        if ".." in PurePosixPath(value).parts:
            raise ValueError(f"source is {value!r}: write a path without '..'")
        return value


def _table_of(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Artifacts = list[Annotated[ArtifactTable, BeforeValidator(_table_of)]]
"""Paths, or tables that say more of one."""


class SolutionTable(Table):
    """[solution]: variables of solve.sh."""

    env: Variables = {}


class StepTable(Table):
    """One of [[steps]]."""

    name: Annotated[str, Field(pattern=STEP_NAME, max_length=255)]
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: Artifacts = []


class TaskToml(Table):
    """The whole file."""

    older: ClassVar[frozenset[str]] = frozenset({"version"})

    schema_version: str = "1.4"
    task: PackageTable | None = None
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] | None = None
    artifacts: Artifacts = []

    @model_validator(mode="before")
    @classmethod
    def _older_version(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "version" not in given:
            return given
        table = dict(given)
        version = table.pop("version")
        return {"schema_version": version, **table}

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+)\.(\d+)", value)
        if found is None or not (1, 0) <= (int(found[1]), int(found[2])) <= NEWEST:
            newest = ".".join(map(str, NEWEST))
            raise ValueError(f"schema_version is {value!r}, but 1.0 to {newest} are read: use one")
        return value

    @field_validator("steps")
    @classmethod
    def _different_steps(cls, steps: list[StepTable] | None) -> list[StepTable] | None:
        names = [step.name.casefold() for step in steps or []]
        if len(set(names)) < len(names):
            raise ValueError("two steps have one name: give each its own")
        return steps


def read_task_toml(file: Path) -> tuple[TaskToml, tuple[str, ...]]:
    """Read a task.toml; return it with the keys that the format does not have.

    Raises UnusableTask that states the file, the key, its value and the repair.
    """
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UnusableTask(f"{file} cannot be read as TOML ({error}): correct it") from None
    try:
        found = validated(TaskToml, given)
    except ValidationError as error:
        raise UnusableTask(_refusal(file, error)) from None
    return found, tuple(unknown_keys(given, TaskToml))


def _refusal(file: Path, error: ValidationError) -> str:
    first = first_error(error, with_input=True)
    said = str(first["msg"]).removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    value = first.get("input")
    if first["type"] == "value_error" or isinstance(value, Mapping):
        return f"{file}: {where + ': ' if where else ''}{said}"
    return f"{file}: {where} is {shown(repr(value), LONGEST_SHOWN)}: {said}, so correct it"


def unknown_keys(given: Mapping[str, Any], kind: type[Table], at: str = "") -> Iterator[str]:
    """Yield the dotted keys that the format does not have."""
    for key, value in given.items():
        field = kind.model_fields.get(key)
        if field is None:
            if key not in kind.older:
                yield f"{at}{key}"
            continue
        inner = next(_tables(field.annotation), None)
        for one in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(one, Mapping):
                yield from unknown_keys(one, inner, f"{at}{key}.")


def _tables(annotation: Any) -> Iterator[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for part in get_args(annotation):
        yield from _tables(part)


def _megabytes(key: str, text: Any) -> int:
    """Return the MB of a size such as "2G".

    >>> _megabytes("memory", "2G"), _megabytes("memory", "512m")
    (2048, 512)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", str(text).upper())
    size = math.floor(float(found[1]) * SIZES[found[2]]) if found and isinstance(text, str) else 0
    if size < 1:
        raise ValueError(f'{key} is {text!r}: write a size of 1 MB or more, such as "512M" or "2G"')
    return size


def unsupported(toml: TaskToml) -> Iterator[str]:
    """Yield what a task asks for that containers here do not offer."""
    yield from _of_environment("environment", toml.environment)
    for where, verifier in _verifiers(toml):
        if verifier.environment is not None:
            yield from _of_environment(f"{where}.environment", verifier.environment)
        for hook in verifier.collect:
            if hook.service != "main":
                yield f"{where}.collect runs in the service {hook.service!r}: only main's are run"
    steps = toml.steps or []
    for artifact in [*toml.artifacts, *(one for step in steps for one in step.artifacts)]:
        if artifact.service not in (None, "main"):
            yield f"artifacts are those of the service {artifact.service!r}: only main's are taken"


def _of_environment(where: str, table: EnvironmentTable) -> Iterator[str]:
    if table.os == "windows":
        yield f"{where}.os is 'windows', and containers here are Linux"
    if table.gpus or table.tpu is not None:
        yield f"{where} asks for accelerators, and containers here have none"
    if table.skills_dir is not None:
        yield f"{where}.skills_dir is set, and agents here take no skills"


def _verifiers(toml: TaskToml) -> Iterator[tuple[str, VerifierTable]]:
    yield "verifier", toml.verifier
    yield from ((f"steps.{step.name}.verifier", step.verifier) for step in toml.steps or [])
