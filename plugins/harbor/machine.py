"""The machine of one episode: a container, the steps of its task, and the agent's commands in it.

    start -> step 1: files, setup, healthcheck -> the agent's commands -> verified -> step 2 -> ...

What fails here through nobody's fault is a `SandboxError`: no reward, and the episode is played
again. Time counts while a command runs; the seconds of a model are none of the agent's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_mesh.plugins.harbor import monitor
from composer_mesh.plugins.harbor.compose import MAIN, ComposeService
from composer_mesh.plugins.harbor.containers.port import (
    Container,
    Containers,
    ContainerSettings,
    ContainerSnapshot,
    FinishedCommand,
    NetworkKind,
)
from composer_mesh.plugins.harbor.proxy import Outside, proxied
from composer_mesh.plugins.harbor.services import Services, TaskFailure, healthy, said
from composer_mesh.plugins.harbor.task_folder import (
    Files,
    HarborFolder,
    TaskStep,
    image_of,
    resolved,
)
from composer_mesh.plugins.harbor.task_toml import (
    NO_NETWORK,
    EnvironmentTable,
    Network,
    User,
)
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import MIB

SETUP_S = 60.0
"""Seconds of the commands that prepare a container."""
FOLDERS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
HIDDEN = ("/tests", "/logs/verifier")
"""What no agent of a later step may read."""
PROBE = (
    "pwd; command -v bash || command -v sh; "
    "ls -1 /bin /sbin /usr/bin /usr/sbin /usr/local/bin /usr/local/sbin 2>/dev/null"
)
"""Prints the working folder, the shell, and the programs of the image."""


@dataclass(frozen=True)
class Limits:
    """What containers may use where a task does not say, and what of this machine they may read.

    `variables` are those of this machine that `${NAME}` in a task may take. Without `public` no
    container has a network; `outside` is where proxies of allowlists connect to.
    """

    agent_s: float = 3600.0
    memory_bytes: int | None = None
    processes: int = 512
    start_s: float = 120.0
    public: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    outside: Outside = field(default_factory=Outside)

    def network(self, stated: Network) -> Network:
        """Return the network of a phase: what its task states, or none."""
        return stated if self.public else NO_NETWORK


def kind_of(network: Network) -> NetworkKind:
    """Return what a container has of a phase's network: with an allowlist only a proxy."""
    return "host" if network.mode == "public" else "none"


def settings_of(
    folder: HarborFolder,
    limits: Limits,
    network: Network,
    main: ComposeService,
    own: EnvironmentTable | None = None,
) -> ContainerSettings:
    """Return the settings of a task's container, or of the `own` one of its verifier.

    `main` is what the Compose file states of the former.
    """
    table = own or folder.toml.environment
    if own is not None:
        main = ComposeService(MAIN)
    image = main.image or image_of(table, folder.folder / "environment")
    variables = resolved(table.env, limits.variables, f"{folder.name}: environment.env")
    memory = table.memory_mb * MIB if table.memory_mb is not None else limits.memory_bytes
    return ContainerSettings(
        image,
        cpus=table.cpus,
        memory_bytes=memory,
        storage_bytes=None if table.storage_mb is None else table.storage_mb * MIB,
        processes=limits.processes,
        network=kind_of(network),
        environment={**main.environment, **variables},
        workdir=table.workdir or main.workdir,
        user=main.user,
        build_s=table.build_timeout_sec,
        start_s=limits.start_s,
    )


class Machine:
    """One episode's container, and which step of the task it is in."""

    container: Container
    """The running container; set by `start`. A program may be run in it as any command is."""

    def __init__(
        self,
        containers: Containers,
        folder: HarborFolder,
        limits: Limits,
        mounts: Mapping[str, Path] = {},
    ) -> None:
        """`mounts` are folders of this machine that the agent reads, by path in the container."""
        self.containers, self.folder, self.limits = containers, folder, limits
        self.place = 0
        """The present step, from 0."""
        self.compose = folder.compose(limits.variables)
        own = settings_of(folder, limits, self.network, self.compose.main)
        self.settings = replace(own, mounts=mounts, names=self.compose.names)
        self.services = self.new_services()
        self.workdir, self.shell = "/", "/bin/sh"
        self.programs: frozenset[str] = frozenset()
        self.noted: Counter[str] = Counter()
        """Findings on the agent's commands."""
        self.accepted: frozenset[str] = frozenset()
        """Paths that the task itself has changed, such as by the tests of an earlier step."""
        self.variables: Mapping[str, str] = {}
        """Those of the agent's commands, which name the proxy where there is one."""
        self._used_s = 0.0
        self._proxy = AsyncExitStack()
        self._opened: Container | None = None
        self._kept: ContainerSnapshot | None = None

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""
        return self.place == len(self.folder.steps) - 1

    @property
    def step(self) -> TaskStep:
        """The step that is played."""
        return self.folder.steps[self.place]

    @property
    def network(self) -> Network:
        """The agent's network in the present step."""
        return self.limits.network(self.step.agent_network)

    @property
    def tests_network(self) -> Network:
        """The verifier's network in the present step."""
        return self.limits.network(self.step.verifier_network)

    @property
    def remaining_s(self) -> float:
        """Seconds that commands of the agent may still take in this step."""
        limit = self.step.agent.timeout_sec or self.limits.agent_s
        return max(0.0, limit - self._used_s)

    def new_services(self) -> Services:
        """Return the services of a container of this task; none of them is started yet."""
        return Services(self.containers, self.compose.services, self.settings)

    async def start(self) -> None:
        """Start the container, its services and its first step. Raises SandboxError."""
        self.container = self._opened = await self.containers.start(self.settings)
        await self.services.start(self.container)
        await self._open_proxy()
        for folder in FOLDERS:
            await self.container.put({}, folder, owner=user_of(self.step.agent.user) or "root")
        await self._probe()
        if (check := self.folder.toml.environment.healthcheck) is not None:
            await healthy(self.container, check, self.variables)
        await self.begin_step()
        await self.services.refuse_ended()

    async def begin_step(self) -> None:
        """Put the files of the present step in place, and run its setup and its healthcheck."""
        self._used_s = 0.0
        await prepare_step(self.container, self.step, self.workdir, self.variables)

    async def end_agent(self) -> None:
        """End what the agent runs, and its way out."""
        await self._proxy.aclose()
        self.variables = {}
        await self.container.stop_processes()

    async def change_network(self, network: Network) -> None:
        """Give the container what it has of a phase's network; nothing runs in it meanwhile."""
        if (kind := kind_of(network)) != self.settings.network:
            await self.container.stop_processes(kind)
            self.settings = replace(self.settings, network=kind)

    async def _open_proxy(self) -> None:
        names = self.settings.names
        opened = proxied(self.container, self.network, self.limits.outside, names)
        self.variables = await self._proxy.enter_async_context(opened)

    async def next_step(self) -> None:
        """Begin the step after the present one, without the tests of that."""
        for path in HIDDEN:
            await self.container.remove(path)
        await self.accept_changes()
        self.place += 1
        await self.change_network(self.network)
        await self._open_proxy()
        await self.begin_step()

    async def accept_changes(self) -> None:
        """Take what has changed so far for the task's own: it is no finding on the agent."""
        self.accepted = frozenset(await self.container.changes())

    async def run(self, command: str, timeout_s: float) -> FinishedCommand:
        """Run a command of the agent in the working folder, as the agent's user."""
        if monitor.names_verifier(command):
            self.noted["names_verifier"] += 1
        return await self.run_program([self.shell, *("-c", command)], timeout_s=timeout_s)

    async def run_program(
        self,
        argv: list[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        environment: Mapping[str, str] = {},
        output_bytes: int = MIB,
    ) -> FinishedCommand:
        """Run a program of the agent, such as a harness; its seconds count as the agent's.

        It gets `timeout_s` seconds, or those that remain if they are fewer.
        """
        done = await self.container.run(
            argv,
            stdin=stdin,
            timeout_s=min(timeout_s, max(self.remaining_s, 0.1)),
            user=user_of(self.step.agent.user),
            environment={**self.variables, **environment},
            workdir=self.workdir,
            output_bytes=output_bytes,
        )
        self._used_s += done.seconds
        return done

    @asynccontextmanager
    async def timed(self, timeout_s: float) -> AsyncIterator[None]:
        """Count the seconds of the context as the agent's, as `run_program` does.

        Raises TimeoutError after `timeout_s`, or after the seconds that remain if they are fewer.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(min(timeout_s, max(self.remaining_s, 0.1))):
                yield
        finally:
            self._used_s += loop.time() - began

    async def release(self) -> None:
        """Give the container's place to another one; its files are kept if a step follows."""
        if not self.is_last:
            self._kept = await self.container.snapshot()
        await self.services.close()
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def resume(self) -> None:
        """Continue with the files that `release` kept, if it was called and a step follows."""
        if self._kept is not None:
            self.container = self._opened = await self.containers.start(
                self.settings, snapshot=self._kept
            )
            await self.services.start(self.container)
            await self._forget()

    async def close(self) -> None:
        """End the container and remove what was kept of it."""
        opened, self._opened = self._opened, None
        async with AsyncExitStack() as ends:  # each of them, whatever becomes of the others
            ends.push_async_callback(self._forget)
            if opened is not None:
                ends.push_async_callback(opened.close)
            ends.push_async_callback(self.services.close)
            ends.push_async_callback(self._proxy.aclose)

    async def _forget(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.remove()

    async def _probe(self) -> None:
        done = await self.container.run(
            ["/bin/sh", "-c", PROBE], timeout_s=SETUP_S, output_bytes=MIB
        )
        lines = done.output.decode(errors="replace").splitlines()
        if len(lines) < 2 or not lines[0].startswith("/"):
            raise UnusableTask(
                f"the image {self.settings.image} of Harbor task {self.folder.name!r} has no "
                f"/bin/sh that runs ({said(done)}): tools and tests need one"
            )
        self.workdir, self.shell = lines[0], lines[1]
        self.programs = frozenset(line for line in lines[2:] if "/" not in line)


async def prepare_step(
    container: Container, step: TaskStep, workdir: str, variables: Mapping[str, str]
) -> None:
    """Put a step's files into the working folder, run its setup.sh, wait until it is healthy."""
    files = await asyncio.to_thread(step.workdir)
    user = user_of(step.agent.user)
    if files.contents:
        programs = {*files.executable, *({"setup.sh"} & files.contents.keys())}
        await put(container, replace(files, executable=programs), workdir, user or "root")
    if "setup.sh" in files.contents:
        done = await container.run(
            [f"{workdir.rstrip('/')}/setup.sh"],
            timeout_s=SETUP_S,
            user=user,
            environment=variables,
            workdir=workdir,
        )
        if done.exit_code != 0:
            raise TaskFailure("setup", f"setup.sh of step {step.name!r} failed: {said(done)}")
    if step.healthcheck is not None:
        await healthy(container, step.healthcheck, variables)


async def put(container: Container, files: Files, folder: str, owner: str = "root") -> None:
    """Copy files into a folder of a container."""
    await container.put(files.contents, folder, executable=files.executable, owner=owner)


def user_of(user: User | None) -> str | None:
    """Return a user as containers take it."""
    return None if user is None else str(user)
