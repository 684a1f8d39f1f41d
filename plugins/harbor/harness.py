"""A harness program in the container of an episode, and its only way out: the episode's endpoint.

    harness in the box -- 127.0.0.1:PORT of the box --> this process --> 127.0.0.1:PORT of the host

The port is the endpoint's own, so the base URL is the same in the box. The socket in the box is
one that this process accepts on: no program of the image takes part, and no other port of the
host is reached. Whoever starts an episode says in its row what runs (`ROW`); the model cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from composer_mesh.plugins.harbor.box_ports import Stream, joined, served
from composer_mesh.plugins.harbor.containers.port import FinishedCommand
from composer_mesh.plugins.harbor.machine import Machine, TaskFailure, user_of
from composer_mesh.tasks.sandbox import MIB

ROW = "harness"
"""The key of an episode's row that has a launch."""
PROMPT = "{prompt}"
"""In a command, the instruction of the step."""
HOME = "/logs/agent/harness"
"""Where a harness has its files in the container."""
PROGRAM = "/opt/harness"
"""Where the folder of the program is in the container."""
LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0


@dataclass(frozen=True)
class Launch:
    """How a harness is started: its command, variables, files, the host's folder, its endpoint.

    `files` are put below `HOME`. `program` is bound to `PROGRAM`, read-only; empty for none. `port`
    is that of the endpoint on this machine's loopback. `harness` names a known one.
    """

    argv: Sequence[str]
    port: int
    timeout_s: float
    program: str = ""
    harness: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self | None:
        """Return the launch of a row, if it has one."""
        return cls(**row[ROW]) if ROW in row else None

    @property
    def row(self) -> dict[str, Any]:
        """What makes a row one of an episode that a harness plays."""
        return {ROW: asdict(self)}

    @property
    def mounts(self) -> dict[str, Path]:
        """The folders of this machine that the harness needs."""
        return {PROGRAM: Path(self.program)} if self.program else {}

    async def play(self, machine: Machine) -> FinishedCommand:
        """Run the harness on the present step of a machine. Waits for its end or its limit.

        Raises TaskFailure where the endpoint could not be reached, whatever the harness made of it.
        """
        prompt = await asyncio.to_thread(lambda: machine.step.instruction)
        owner = user_of(machine.step.agent.user) or "root"
        files = {name: text.encode() for name, text in self.files.items()}
        await machine.container.put(files, HOME, owner=owner)
        async with relayed(machine, self.port) as unreachable:
            done = await machine.run_program(
                [word.replace(PROMPT, prompt) for word in self.argv],
                stdin=prompt.encode(),
                timeout_s=self.timeout_s,
                environment=self.environment,
                output_bytes=MIB,
            )
        if unreachable:
            raise TaskFailure("endpoint_unreachable", f"port {self.port}: {unreachable[0]}")
        return done


@asynccontextmanager
async def relayed(machine: Machine, port: int) -> AsyncIterator[list[str]]:
    """Connect a port of the container's loopback to that of this machine, while the context lasts.

    Yields a list of what kept connections from the endpoint. A container with this machine's
    network reaches the endpoint without it.
    """
    unreachable: list[str] = []
    async with contextlib.AsyncExitStack() as opened:
        _, probe = await _connected(port)
        probe.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await joined(reader, writer, await _connected(port))
            except TaskFailure as failure:
                unreachable.append(failure.detail)

        if machine.settings.network != "host":
            await opened.enter_async_context(served(machine.container, port, serve))
        yield unreachable


async def _connected(port: int) -> Stream:
    """Connect to the endpoint; raise TaskFailure where it is not on this machine, or has died."""
    try:
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(LOOPBACK, port)
    except OSError as error:
        raise TaskFailure(
            "endpoint_unreachable",
            f"the endpoint of the episode is not at {LOOPBACK}:{port} ({error}): rollout workers "
            "and environments have to be on one host",
        ) from None
