"""Folders of Harbor tasks: which there are, their files, and why one cannot be played.

A folder with a task.toml is a task. Files are read when they are needed, so that thousands of tasks
take no memory. Nothing of a task's `tests` or `solution` is ever in the prompt.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from composer_mesh.plugins.harbor.compose import FILE, Compose, read_compose
from composer_mesh.plugins.harbor.containers.port import ImageSource
from composer_mesh.plugins.harbor.task_toml import (
    AgentTable,
    ArtifactTable,
    EnvironmentTable,
    HealthcheckTable,
    McpServerTable,
    Network,
    StepTable,
    Table,
    TaskToml,
    VerifierTable,
    network_of,
    read_task_toml,
    unsupported,
)
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask

DEEPEST = 6
"""Levels of folders below `data.path` in which tasks are looked for."""
MOST_TASKS = 100_000
MOST_BYTES = 64 * 1024 * 1024
"""Bytes of a folder of a task that is copied into containers."""
MOST_INSTRUCTION = 200_000
"""Bytes of an instruction, far beyond what a model reads."""
COMPOSE = re.compile(r"(docker-)?compose\.ya?ml")
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
PLAIN_SOLUTION = re.compile(r"/solution|\$0|\$\{0|BASH_SOURCE|\$@|\$[1-9]")
"""What a solution contains that depends on where it is run from."""


@dataclass(frozen=True)
class Files:
    """Files by relative path, and those of them that are programs."""

    contents: Mapping[str, bytes]
    executable: Collection[str] = ()

    def over(self, below: Files) -> Files:
        """Return these files, and those of another folder that they do not replace."""
        contents = {**below.contents, **self.contents}
        programs = {*self.executable, *(set(below.executable) - self.contents.keys())}
        return Files(contents, frozenset(programs))


def read_files(folder: Path) -> Files:
    """Read a folder whole; none if there is none. Raises UnusableTask for links and too much."""
    contents: dict[str, bytes] = {}
    executable = set()
    size = 0
    for file in sorted(folder.rglob("*")) if folder.is_dir() else []:
        refuse_link(file)
        if not file.is_file():
            continue
        name, content = file.relative_to(folder).as_posix(), file.read_bytes()
        size += len(content)
        if size > MOST_BYTES:
            raise UnusableTask(
                f"{folder} has more than {MOST_BYTES:,} bytes: put large files into the image"
            )
        contents[name] = content
        if os.access(file, os.X_OK) or content.startswith(b"#!"):
            executable.add(name)
    return Files(contents, frozenset(executable))


def refuse_link(file: Path) -> None:
    """Raise UnusableTask for a symbolic link: it would arrive in the container without its file."""
    if file.is_symlink():
        raise UnusableTask(
            f"{file} is a symbolic link, which names nothing in a container: write the file itself "
            "(hf download --local-dir copies a dataset without links)"
        )


@dataclass(frozen=True)
class TaskStep:
    """One instruction and its tests; a task without [[steps]] has one, without a name."""

    name: str
    folder: Path
    task: HarborFolder
    agent: AgentTable
    verifier: VerifierTable
    min_reward: Mapping[str, float]
    healthcheck: HealthcheckTable | None
    artifacts: tuple[ArtifactTable, ...]
    agent_network: Network
    verifier_network: Network

    @property
    def instruction(self) -> str:
        """What the agent reads."""
        return (self.folder / "instruction.md").read_text(encoding="utf-8")

    def tests(self) -> Files:
        """What is copied to /tests: the task's, and those of the step over them."""
        shared = read_files(self.task.folder / "tests")
        return read_files(self.folder / "tests").over(shared) if self.name else shared

    def solution(self) -> Files:
        """What the oracle has at /solution: the step's, or that of the task."""
        return read_files(self._solution_folder)

    @property
    def has_oracle(self) -> bool:
        """Whether there is a solution/solve.sh for it."""
        return (self._solution_folder / "solve.sh").is_file()

    def workdir(self) -> Files:
        """What is copied into the working folder before the step begins."""
        return read_files(self.folder / "workdir") if self.name else Files({})

    @property
    def tests_image(self) -> Path | None:
        """The folder whose Dockerfile makes the image of a separate verifier, with /tests in it."""
        own = self.folder / "tests"
        has = self.verifier.separate and (own / "Dockerfile").is_file()
        return own if has else None

    @property
    def _solution_folder(self) -> Path:
        own = self.folder / "solution"
        return own if own.is_dir() else self.task.folder / "solution"

    def missing(self) -> Iterator[str]:
        """Yield which files of it are missing, or no instruction for a model."""
        yield from self._instruction_problems()
        tests = self.folder / "tests", self.task.folder / "tests"
        if self.tests_image is None and not any((one / "test.sh").is_file() for one in tests):
            yield f"{self.name or 'the task'} has no tests/test.sh"

    def _instruction_problems(self) -> Iterator[str]:
        file, name = self.folder / "instruction.md", self.name or "the task"
        if not file.is_file():
            yield f"{name} has no instruction.md"
        elif (size := file.stat().st_size) > MOST_INSTRUCTION:
            yield f"instruction.md of {name} has {size:,} bytes, {MOST_INSTRUCTION:,} at most"
        else:
            try:
                if not self.instruction.strip():
                    yield f"instruction.md of {name} is empty"
            except UnicodeDecodeError as error:
                yield f"instruction.md of {name} is no UTF-8 text: {error.reason} at {error.start}"


@dataclass(frozen=True)
class HarborFolder:
    """A task: its name below the folder of tasks, its folder, and what its task.toml says."""

    name: str
    folder: Path
    toml: TaskToml
    unknown: tuple[str, ...] = ()
    """Keys of task.toml that the format does not have."""

    @cached_property
    def steps(self) -> tuple[TaskStep, ...]:
        """What is done one after the other in one container; at least one."""
        if not self.toml.steps:
            return (self._step("", self.folder, StepTable(name="only")),)
        places = self.folder / "steps"
        return tuple(self._step(one.name, places / one.name, one) for one in self.toml.steps)

    def _step(self, name: str, folder: Path, own: StepTable) -> TaskStep:
        """Return a step: its own table over those of the task."""
        toml = self.toml
        verifier = _step_verifier(toml.verifier, own.verifier)
        separate = verifier.environment if verifier.separate else None
        return TaskStep(
            name,
            folder,
            self,
            toml.agent.model_copy(update=_stated(own.agent)),
            verifier,
            _thresholds(own.min_reward),
            own.healthcheck,
            (*toml.artifacts, *own.artifacts),
            network_of(own.agent, toml.agent, toml.environment),
            network_of(own.verifier, toml.verifier, separate or toml.environment),
        )

    @property
    def has_oracle(self) -> bool:
        """Whether every step has a solution/solve.sh."""
        return all(step.has_oracle for step in self.steps)

    @property
    def may_have_network(self) -> bool:
        """Whether a phase has a network."""
        networks = [(step.agent_network, step.verifier_network) for step in self.steps]
        return any(one.mode != "no-network" for pair in networks for one in pair)

    def compose(self, variables: Mapping[str, str]) -> Compose:
        """Return the services of the task; raises UnusableTask.

        `variables` are those of this machine that it may take.
        """
        return read_compose(self.folder / "environment", variables)

    def mcp_servers(self, variables: Mapping[str, str]) -> list[McpServerTable]:
        """Return the servers of the task, with variables in their headers replaced."""
        return [
            one.model_copy(
                update={
                    "headers": resolved(
                        one.headers, variables, f"{self.name}: headers of {one.name!r}"
                    )
                }
            )
            for one in self.toml.environment.mcp_servers
        ]

    @property
    def has_compose(self) -> bool:
        """Whether it has a Compose file."""
        return (self.folder / "environment" / FILE).is_file()

    @property
    def needs_own_loopback(self) -> bool:
        """Whether its networks, its services or its MCP servers need a loopback of boxes."""
        servers = self.toml.environment.mcp_servers
        return self._has_networks or self.has_compose or any(one.is_inside for one in servers)

    @property
    def _has_networks(self) -> bool:
        """Whether a phase has a list of hosts, or two in one container have other networks."""
        agents = {step.agent_network for step in self.steps}
        shared = {step.verifier_network for step in self.steps if not step.verifier.separate}
        every = {*agents, *(step.verifier_network for step in self.steps)}
        return len(agents | shared) > 1 or any(one.mode == "allowlist" for one in every)

    def problems(self, networks: bool, variables: Mapping[str, str]) -> Iterator[str]:
        """Yield why the task cannot be played here; nothing if it can.

        It is played with `networks` or without, and with `variables` of this machine.
        """
        yield from unsupported(self.toml)
        yield from self._network_problems(networks)
        yield from self._environment_problems(networks, variables)
        for name in ("trajectory.json", ".harborignore"):
            if any(self.folder.rglob(name)):
                yield f"it has a {name}, which is not read here"
        for file in self.folder.rglob("*"):
            if file.is_symlink():
                where = file.relative_to(self.folder)
                yield f"{where} is a symbolic link, which names nothing in a container"
        for step in self.steps:
            yield from step.missing()

    def _environment_problems(self, networks: bool, variables: Mapping[str, str]) -> Iterator[str]:
        environment = self.folder / "environment"
        for file in sorted(environment.glob("*")):
            if COMPOSE.fullmatch(file.name) and file.name != FILE:
                yield f"environment/{file.name} is not read: rename it to {FILE}"
        image = None
        try:
            compose = self.compose(variables)
        except UnusableTask as error:
            yield str(error)
        else:
            image = compose.main.image
            yield from self._service_problems(compose, networks)
        dockerfile = (environment / "Dockerfile").is_file()
        named = self.toml.environment.docker_image is not None or image is not None
        if not named and not dockerfile:
            yield "it has neither environment/Dockerfile nor environment.docker_image"

    def _network_problems(self, networks: bool) -> Iterator[str]:
        if self._has_networks and not networks:
            yield (
                "it has an allowlist, or a network for a single phase, and data.options.network is "
                "'none': set it to 'task'"
            )
        own = network_of(self.toml.environment)
        for step in self.steps:
            if step.agent_network != own and (step.folder / "workdir" / "setup.sh").is_file():
                yield (
                    f"setup.sh of step {step.name!r} would have the network of the agent, which is "
                    f"{step.agent_network.mode!r} while that of the environment is {own.mode!r}"
                )

    def _service_problems(self, compose: Compose, networks: bool) -> Iterator[str]:
        agents = {step.agent_network.mode for step in self.steps}
        shared = {step.verifier_network.mode for step in self.steps if not step.verifier.separate}
        separate = any(step.verifier.separate for step in self.steps)
        if self.has_compose and networks and "public" in agents | shared:
            yield (
                f"it has {FILE} and a public network, and services share one of their own: set "
                'network_mode to "no-network" or "allowlist", or data.options.network to "none"'
            )
        if self.has_compose and separate and len(self.steps) > 1:
            yield f"it has {FILE}, steps and a separate verifier, for which services would end"
        reached = networks and agents == {"public"}
        for server in self.toml.environment.mcp_servers:
            inside = not server.host or server.is_inside or server.host in compose.names
            if not inside and not reached:
                yield (
                    f"the MCP server {server.name!r} has the url {server.url!r}, which is no "
                    f"service of environment/{FILE} and needs a public network: name one of "
                    f"{', '.join(compose.names) or 'its services'}, or set network_mode and "
                    "data.options.network"
                )

    def gold(self, environment: Mapping[str, str], command_s: int, agent_s: int) -> list[str]:
        """Return the calls that play the oracle solution of every step, which all have one.

        `environment` are the variables of [solution]. A solution may take all of the agent's time,
        by default `agent_s` seconds; a command has `command_s` unless it asks for more. Raises
        UnusableTask for a file that is no text, which no tool writes.
        """
        calls: list[str] = []
        for step in self.steps:
            seconds = int(step.agent.timeout_sec or agent_s)
            more = {"timeout_s": seconds} if seconds > command_s else {}
            calls += [*_solved(step, environment, more), call_text("submit", {})]
        return calls


def _solved(
    step: TaskStep, environment: Mapping[str, str], more: Mapping[str, int]
) -> Iterator[str]:
    files = step.solution()
    text = files.contents["solve.sh"].decode(errors="replace")
    if len(files.contents) == 1 and not environment and not PLAIN_SOLUTION.search(text):
        lines = [line for line in text.splitlines() if not line.startswith("#!")]
        yield call_text("bash", {"command": "\n".join(lines).strip(), **more})
        return
    for name, content in files.contents.items():
        try:
            said = content.decode()
        except UnicodeDecodeError:
            raise UnusableTask(
                f"Harbor task {step.task.name!r}: solution/{name} is no text, and the oracle "
                "writes files by the agent's tools: write it as text"
            ) from None
        yield call_text("write_file", {"path": f"/solution/{name}", "content": said})
    names = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
    programs = " ".join(shlex.quote(f"/solution/{one}") for one in {*files.executable, "solve.sh"})
    command = f"chmod +x {programs}\n{names} /solution/solve.sh".replace("\n ", "\n")
    yield call_text("bash", {"command": command, **more})


def image_of(table: EnvironmentTable, folder: Path) -> ImageSource:
    """Return the image of an [environment]: the one that it names, or that of its Dockerfile."""
    if table.docker_image is not None:
        return ImageSource(table.docker_image)
    return ImageSource(build=folder)


def _thresholds(given: float | dict[str, float] | None) -> Mapping[str, float]:
    if given is None:
        return {}
    return given if isinstance(given, dict) else {"reward": float(given)}


def _step_verifier(shared: VerifierTable, own: VerifierTable) -> VerifierTable:
    """Return how a step is verified: its own table over that of the task, key by key."""
    stated = {**_stated(own), "env": {**shared.env, **own.env}}
    if own.environment is not None:
        stated["environment_mode"] = "separate"
    return shared.model_copy(update=stated)


def _stated(table: Table) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.model_fields_set}


def read_folders(path: Path) -> list[HarborFolder]:
    """Return the tasks in a folder, or the one that it is, in the order of their names.

    Raises UnusableTask where there is none, where names clash, and for a task.toml that is wrong.
    """
    if not path.is_dir():
        raise UnusableTask(
            f"data.path is {str(path)!r}, which is no folder: name a folder of Harbor tasks, or of "
            "one task with its task.toml"
        )
    places = [path] if (path / "task.toml").is_file() else list(_below(path, DEEPEST))
    if not places:
        raise UnusableTask(
            f"{path} has no task.toml within {DEEPEST} levels of folders: name a folder of Harbor "
            "tasks"
        )
    if len(places) > MOST_TASKS:
        raise UnusableTask(f"{path} has more than {MOST_TASKS:,} tasks: name a folder with fewer")
    found = []
    for place in places:
        toml, unknown = read_task_toml(place / "task.toml")
        name = place.relative_to(path).as_posix() if place != path else path.absolute().name
        found.append(HarborFolder(name, place, toml, unknown))
    return found


def _below(path: Path, levels: int) -> Iterator[Path]:
    for folder in sorted(one for one in path.iterdir() if one.is_dir() and not one.is_symlink()):
        if (folder / "task.toml").is_file():
            yield folder
        elif levels > 1:
            yield from _below(folder, levels - 1)


def resolved(variables: Mapping[str, str], known: Mapping[str, str], where: str) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` in them replaced.

    `known` are the variables of this machine that the options name; no other one is read. Raises
    UnusableTask for one that is not among them and has no default.

    >>> resolved({"A": "${B:-2} ${C}"}, {"C": "3"}, "env")
    {'A': '2 3'}
    """

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name in known:
            return known[name]
        if default is None:
            raise UnusableTask(
                f"{where} takes ${{{name}}} of this machine, which data.options.variables does not "
                f"name, or which is not set: export it and name it there"
            )
        return default

    return {key: REFERENCE.sub(value, text) for key, text in variables.items()}
