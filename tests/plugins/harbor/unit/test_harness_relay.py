"""The way of a harness to its endpoint, when that dies and is at another port afterwards."""

from __future__ import annotations

import asyncio
import gc
import http.client
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from fake_containers import FakeContainers
from harbor_folders import made, written

from composer_mesh.plugins.harbor.box_ports import Stream, served
from composer_mesh.plugins.harbor.harness import LOOK_S, LOOPBACK, MOST_HELD, Launch, Relay
from composer_mesh.plugins.harbor.machine import Machine

REQUEST = b"POST /v1 HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"


class Endpoint:
    """A worker's endpoint: what each of its connections received; `answers` are sent in order."""

    def __init__(self, *answers: bytes) -> None:
        self.answers, self.got, self.ended = list(answers), asyncio.Event(), asyncio.Event()
        self.received = bytearray()
        self._open: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        return int(self._server.sockets[0].getsockname()[1])

    def kill(self) -> None:
        """End as a killed process does: its connections are reset."""
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def until(self, count: int) -> None:
        while len(self.received) < count:
            self.got.clear()
            await self.got.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        with suppress(OSError):
            while content := await reader.read(1 << 16):
                self.received += content
                self.got.set()
                if self.answers:
                    writer.write(self.answers.pop(0))
        writer.close()
        self.ended.set()


class Way:
    """A relay over which a harness is connected, and the port of its endpoint."""

    def __init__(self, kind: type[Relay] = Relay) -> None:
        self.port = 0
        self.relay = kind(lambda: self.port)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Stream]:
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        async with served(listening, self.relay._serve):
            stream = await asyncio.open_connection(LOOPBACK, port)
            yield stream
            stream[1].close()


async def test_a_request_without_an_answer_is_sent_again_to_the_next_endpoint() -> None:
    way, first, second = Way(), Endpoint(ANSWER), Endpoint(ANSWER)
    way.port = await first.start()
    async with way.connected() as (reader, writer):
        writer.write(REQUEST)  # the connection is kept after this answer
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        writer.write(REQUEST[:20])
        await first.until(len(REQUEST) + 20)
        first.kill()
        writer.write(REQUEST[20:])
        way.port = await second.start()
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        assert second.received == REQUEST
    second.kill()
    assert way.relay.unreachable == []


@pytest.mark.filterwarnings("error")  # of a connection that nobody closed
@pytest.mark.parametrize("turns", range(12))
async def test_a_relay_that_ends_as_its_harness_does_closes_both_connections(turns: int) -> None:
    """The end comes at each turn of the event loop after that of the harness."""
    way, endpoint = Way(), Endpoint(ANSWER)
    way.port = await endpoint.start()
    async with way.connected() as (reader, writer):
        writer.write(REQUEST)
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        writer.close()
        for _ in range(turns):
            await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await endpoint.ended.wait()
    endpoint.kill()
    gc.collect()


async def test_connections_wait_for_an_endpoint_that_has_moved() -> None:
    way, dead, second = Way(), Endpoint(), Endpoint(ANSWER)
    way.port = await dead.start()
    dead.kill()
    async with way.connected() as (reader, writer):
        writer.write(REQUEST)
        await asyncio.sleep(2 * LOOK_S)
        way.port = await second.start()
        assert await reader.readexactly(len(ANSWER)) == ANSWER
    second.kill()


@pytest.mark.parametrize("answer", [BEGUN, ANSWER])
async def test_an_answer_that_had_begun_is_cut_and_not_asked_for_again(answer: bytes) -> None:
    way, first, second = Way(), Endpoint(answer), Endpoint(ANSWER)
    way.port = await first.start()
    async with way.connected() as (reader, writer):
        writer.write(REQUEST)
        assert await reader.readexactly(len(answer)) == answer
        first.kill()
        way.port = await second.start()
        assert await reader.read() == b""
        assert second.received == b""
    second.kill()


@pytest.mark.parametrize("sent", [b"{} without a head", REQUEST + b"x" * 2 * MOST_HELD])
async def test_what_is_no_whole_request_or_too_large_is_not_sent_again(sent: bytes) -> None:
    way, first, second = Way(), Endpoint(), Endpoint(ANSWER)
    way.port = await first.start()
    async with way.connected() as (reader, writer):
        writer.write(sent)
        await first.until(len(sent))
        first.kill()
        way.port = await second.start()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert second.received == b""
    second.kill()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_is_gone_is_gone_at_the_endpoint(reset: bool) -> None:
    way, first = Way(), Endpoint()
    way.port = await first.start()
    async with way.connected() as (_, writer):
        writer.write(REQUEST)
        await first.until(len(REQUEST))
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        await first.ended.wait()
    first.kill()


class Impatient(Relay):
    """A relay that waits for no other endpoint."""

    moved_s: ClassVar[float] = 0.0


async def test_an_endpoint_that_never_comes_back_is_unreachable() -> None:
    way, dead = Way(Impatient), Endpoint()
    way.port = await dead.start()
    dead.kill()
    async with way.connected() as (reader, _):
        assert await reader.read() == b""
    assert "on one host" in way.relay.unreachable[0]


async def test_a_box_with_the_hosts_network_gets_a_port_of_its_own(tmp_path: Path) -> None:
    endpoint = Endpoint(ANSWER)
    port = await endpoint.start()
    url = f"http://{LOOPBACK}:{port}/e/TOKEN"
    launch = Launch(["run"], port, 10.0, environment={"URL": url}, files={"config": f"x={url}"})
    network = {"task.toml": '[environment]\ndocker_image = "x"\nallow_internet = true\n'}
    task = made(written(tmp_path / "task", network), network="task")
    containers = FakeContainers()
    machine = Machine(containers, task.folder_of({"name": "task"}), task.limits)
    await machine.start()
    assert machine.settings.network == "host"
    async with Relay(lambda: port).serving(machine, port) as own:
        assert own != port
        here = launch.at(own)
        assert here.environment["URL"] == f"http://{LOOPBACK}:{own}/e/TOKEN"
        assert here.files["config"] == f"x=http://{LOOPBACK}:{own}/e/TOKEN"
        connection = http.client.HTTPConnection(LOOPBACK, own)
        await asyncio.to_thread(connection.request, "POST", "/", b"{}")
        assert (await asyncio.to_thread(connection.getresponse)).read() == b"ok"
        connection.close()
    await machine.close()
    endpoint.kill()
