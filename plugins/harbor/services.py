"""Services that run next to an episode's container: started in order, watched, and ended with it.

    main's box -- its network --> box of a service -> its program -> healthy -> the next service

A service that ends or is not healthy before the agent may act is a `TaskFailure`: no reward.
Afterwards it is what the agent finds. Also what else a container waits for: its healthcheck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from composer_mesh.plugins.harbor.compose import MAIN, ComposeService
from composer_mesh.plugins.harbor.containers.port import (
    Container,
    Containers,
    ContainerSettings,
    FinishedCommand,
)
from composer_mesh.plugins.harbor.task_toml import HealthcheckTable
from composer_mesh.tasks.sandbox import SandboxError

SHORT_OUTPUT = 64 * 1024


class TaskFailure(SandboxError):
    """What a task prepares has failed before its agent could act; `kind` is for machines."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class Services:
    """The services of one container, which is one of them itself: `MAIN`."""

    def __init__(
        self,
        containers: Containers,
        services: Sequence[ComposeService],
        settings: ContainerSettings,
    ) -> None:
        """`settings` are those of the main container; each service has its limits for itself."""
        self._back_end, self._services, self._settings = containers, services, settings
        self._containers: dict[str, Container] = {}
        self._running: dict[str, asyncio.Task[FinishedCommand]] = {}
        self._opened = AsyncExitStack()

    async def start(self, main: Container) -> None:
        """Start all services in the network of a container. Waits until they are healthy.

        Raises TaskFailure where one ends or is not healthy, and ContainerError.
        """
        self._containers = {MAIN: main}
        checked: set[str] = set()
        for service in self._services:
            await self._wait_until_healthy([one for one in service.waits_for if one not in checked])
            checked.update(service.waits_for)
            if service.name != MAIN:
                await self._start(service, main)
        await self._wait_until_healthy([n for n in self._containers if n not in checked])
        await self.refuse_ended()

    async def refuse_ended(self) -> None:
        """Raise TaskFailure for a service whose program has ended, or ContainerError."""
        for name, running in self._running.items():
            if running.done():
                done = await running
                raise TaskFailure("service", f"{name!r} ended: {said(done)}")

    async def close(self) -> None:
        """End all services."""
        self._running.clear()
        await self._opened.aclose()

    async def _start(self, service: ComposeService, main: Container) -> None:
        assert service.image is not None, "a Compose file states the image of each service"
        settings = replace(
            self._settings,
            image=service.image,
            environment=service.environment,
            workdir=service.workdir,
            user=service.user,
            mounts={},
        )
        container = await self._back_end.start_sidecar(settings, main)
        self._opened.push_async_callback(container.close)
        self._containers[service.name] = container
        program = container.serve(service.entrypoint, service.command)
        self._running[service.name] = task = asyncio.create_task(program)
        self._opened.push_async_callback(_cancel, task)

    async def _wait_until_healthy(self, names: Sequence[str]) -> None:
        for service in self._services:
            if service.name in names and service.healthcheck is not None:
                check = asyncio.create_task(self._healthy(service.name, service.healthcheck))
                try:
                    await asyncio.wait(
                        [check, *self._running.values()], return_when=asyncio.FIRST_COMPLETED
                    )
                    await self.refuse_ended()
                    await check
                finally:
                    await _cancel(check)

    async def _healthy(self, name: str, check: HealthcheckTable) -> None:
        try:
            await healthy(self._containers[name], check, {})
        except TaskFailure as failure:
            raise TaskFailure("service", f"{name!r}: {failure.detail}") from None


async def _cancel(task: asyncio.Task[object]) -> None:
    """End a task, whatever becomes of it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def healthy(
    container: Container, check: HealthcheckTable, variables: Mapping[str, str]
) -> None:
    """Wait until a healthcheck ends with 0; raise TaskFailure after its retries.

    Failures within the start period do not count.
    """
    loop = asyncio.get_running_loop()
    starts_until, failures = loop.time() + check.start_period_sec, 0
    while True:
        done = await container.run(
            ["/bin/sh", "-c", check.command],
            timeout_s=check.timeout_sec,
            environment=variables,
            output_bytes=SHORT_OUTPUT,
        )
        if done.exit_code == 0:
            return
        starting = loop.time() < starts_until
        failures += not starting
        if failures >= check.retries:
            raise TaskFailure("healthcheck", f"{check.command!r} failed: {said(done)}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


def said(done: FinishedCommand) -> str:
    """Return how a command ended and the end of what it wrote, for people."""
    text = (done.errors or done.output).decode(errors="replace").strip()[-300:]
    how = f"exit code {done.exit_code}" if done.ended == "exited" else done.ended
    return f"{how}: {text}" if text else how
