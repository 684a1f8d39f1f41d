"""A harness program in the container of an episode, and its only way out: the episode's endpoint.

    harness in the box -- 127.0.0.1:PORT of the box --> this process --> 127.0.0.1:PORT of the host

The port is the endpoint's own, so the base URL is the same in the box. The socket in the box is
one that this process accepts on: no program of the image takes part, and no other port of the
host is reached. Whoever starts an episode says in its row what runs (`ROW`); the model cannot.

After the death of a rollout worker the endpoint is at another port of the host, with the same keys.
Connections wait for that meanwhile. A request whose answer had not begun is sent there again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from composer_mesh.plugins.harbor.box_ports import Stream, pumped, served
from composer_mesh.plugins.harbor.containers.port import FinishedCommand
from composer_mesh.plugins.harbor.machine import Machine, user_of
from composer_mesh.plugins.harbor.services import TaskFailure
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
LOOK_S = 0.2
"""Between two attempts to reach the endpoint."""
MOST_HELD = 2 * MIB
"""Of a request that is sent again; the client of a larger one has to."""
METHODS = (b"POST ", b"GET ")


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

    def at(self, port: int) -> Launch:
        """Return the same for a port of the container that leads to the endpoint."""
        before, after = (f"{LOOPBACK}:{one}" for one in (self.port, port))

        def moved(texts: Mapping[str, str]) -> dict[str, str]:
            return {name: text.replace(before, after) for name, text in texts.items()}

        return replace(self, environment=moved(self.environment), files=moved(self.files))

    async def play(self, machine: Machine, endpoint: Callable[[], int]) -> FinishedCommand:
        """Run the harness on the present step of a machine. Waits for its end or its limit.

        `endpoint` returns the port where the endpoint is now. Raises TaskFailure where it could not
        be reached, whatever the harness made of it.
        """
        prompt = await asyncio.to_thread(lambda: machine.step.instruction)
        owner = user_of(machine.step.agent.user) or "root"
        relay = Relay(endpoint)
        async with relay.serving(machine, self.port) as port:
            here = self.at(port)
            files = {name: text.encode() for name, text in here.files.items()}
            await machine.container.put(files, HOME, owner=owner)
            done = await machine.run_program(
                [word.replace(PROMPT, prompt) for word in self.argv],
                stdin=prompt.encode(),
                timeout_s=self.timeout_s,
                environment=here.environment,
                output_bytes=MIB,
            )
        if relay.unreachable:
            raise TaskFailure("endpoint_unreachable", relay.unreachable[0])
        return done


class Relay:
    """Passes connections of a harness to its endpoint; `unreachable` says what kept them from it.

    `endpoint` returns the port of this machine where the endpoint is now. Connections wait at most
    `moved_s` for another one.
    """

    moved_s: ClassVar[float] = 600.0

    def __init__(self, endpoint: Callable[[], int]) -> None:
        self._endpoint = endpoint
        self.unreachable: list[str] = []

    @asynccontextmanager
    async def serving(self, machine: Machine, port: int) -> AsyncIterator[int]:
        """Serve a port of the container's loopback while the context lasts; yield the port.

        A container with this machine's network gets another one, since the endpoint has its own.
        """
        _, probe = await self._connected(0.0)
        probe.close()
        if machine.settings.network == "host":
            listening = socket.create_server((LOOPBACK, 0))
        else:
            listening = await machine.container.listen(port)
        async with served(listening, self._serve):
            yield listening.getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = bytearray()
        try:
            again = True
            while again:
                endpoint = await self._connected(self.moved_s)
                again = await _passed(reader, writer, endpoint, request)
                await asyncio.sleep(LOOK_S if again else 0)  # it has died, or takes no more
        except TaskFailure as failure:
            self.unreachable.append(failure.detail)

    async def _connected(self, patience_s: float) -> Stream:
        """Connect to the endpoint. Waits so long for another one where it has died.

        Raises TaskFailure where it is not on this machine, or no other one comes.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while True:
            port = self._endpoint()
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(LOOPBACK, port)
            except OSError as error:
                if loop.time() >= until:
                    raise TaskFailure(
                        "endpoint_unreachable",
                        f"the endpoint of the episode is not at {LOOPBACK}:{port} ({error}): "
                        "rollout workers and environments have to be on one host",
                    ) from None
            await asyncio.sleep(LOOK_S)


async def _passed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoint: Stream, request: bytearray
) -> bool:
    """Pass bytes both ways until one side ends; return whether `request` has to be sent again.

    That holds what was sent since the endpoint has last answered, also before.
    """
    theirs, ours = endpoint

    def hold(content: bytes) -> None:
        if len(request) <= MOST_HELD:
            request.extend(content)

    def gone() -> bool:
        return reader.at_eof() or reader.exception() is not None

    ours.write(request)
    pumps = [
        asyncio.ensure_future(pumped(reader, ours, hold)),
        asyncio.ensure_future(pumped(theirs, writer, lambda _: request.clear())),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        if not gone():
            await asyncio.wait(pumps[1:])  # its last words, where it takes none
    finally:
        ours.close()  # before anything that the end of the relay may cancel
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    return not gone() and request.startswith(METHODS) and len(request) <= MOST_HELD
