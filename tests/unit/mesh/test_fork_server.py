"""Requests to a fork server: what is sent arrives; what is no request is refused without a leak.

What a fork server prints when its owner has ended: nothing, however many forks end later.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh.fork_server import protocol
from composer_mesh.mesh.fork_server.owner import ForkServers
from composer_mesh.mesh.fork_server.protocol import ForkRefused, ForkRequest
from composer_mesh.mesh.fork_server.server import ForkServer
from composer_mesh.mesh.hosts.exit_status import ExitStatuses

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_a_request_arrives_with_its_streams(pair: Pair) -> None:
    request = ForkRequest(["echo-0", "token", "1"], {"NAME": "wörd \udc80"}, "/folder", 7)
    protocol.send_request(pair[0], request)
    received, streams = protocol.receive_request(pair[1])
    assert received == request
    assert len(streams) == 3
    assert [os.fstat(stream).st_ino for stream in streams] == [
        os.fstat(own).st_ino for own in protocol.STREAMS
    ]
    for stream in streams:
        os.close(stream)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"arguments": []}', b'{"other": 1}', b"\xff"],
)
def test_what_is_no_request_is_refused_and_its_streams_are_closed(pair: Pair, body: bytes) -> None:
    before = descriptors()
    socket.send_fds(pair[0], [protocol.LENGTH.pack(len(body))], [0, 1, 2])
    pair[0].sendall(body)
    with pytest.raises(ForkRefused):
        protocol.receive_request(pair[1])
    assert descriptors() == before


def test_a_request_without_streams_cut_short_or_too_long_is_refused(pair: Pair) -> None:
    pair[0].sendall(protocol.LENGTH.pack(2))
    with pytest.raises(ForkRefused, match="0 streams"):
        protocol.receive_request(pair[1])
    socket.send_fds(pair[0], [protocol.LENGTH.pack(protocol.LONGEST_BYTES + 1)], [0, 1, 2])
    with pytest.raises(ForkRefused, match="the longest has"):
        protocol.receive_request(pair[1])
    socket.send_fds(pair[0], [protocol.LENGTH.pack(10)], [0, 1, 2])
    pair[0].close()
    with pytest.raises(ForkRefused, match="0 of 10 bytes"):
        protocol.receive_request(pair[1])


def test_a_signature_is_of_what_libraries_read_on_import() -> None:
    base = protocol.import_signature({"OMP_NUM_THREADS": "1"})
    assert base == protocol.import_signature({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "3"})
    assert base != protocol.import_signature({"OMP_NUM_THREADS": "2"})
    assert base != protocol.import_signature({"OMP_NUM_THREADS": "1", "PYTHONPATH": "elsewhere"})


async def test_vllm_and_runs_without_preload_start_processes_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(protocol.FOLDER, raising=False)
    servers = ForkServers()
    assert await servers.environment({"VLLM_LOGGING_LEVEL": "ERROR"}, ["json"]) == {}
    assert await servers.environment({}, []) == {}
    assert servers.pids == []


def test_a_process_that_ends_together_with_its_fork_does_not_end_the_server(
    pair: Pair, tmp_path: Path
) -> None:
    with socket.socket() as listening, selectors.DefaultSelector() as selector:
        server = ForkServer(listening, ExitStatuses(tmp_path), os.getpid())
        server._owner_ended, server._woken, server._selector = -1, listening, selector
        forked = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        server._asking[pair[0]] = forked.pid
        gone = selector.register(pair[0], selectors.EVENT_READ)
        ready = (gone, selectors.EVENT_READ)
        assert not server._ended([ready, ready])
        assert forked.wait() == -signal.SIGKILL
        assert not server._asking


SERVER = """
import os, socket, subprocess, tempfile, time
from pathlib import Path
from composer_mesh.mesh.hosts.exit_status import ExitStatuses
from composer_mesh.mesh.fork_server.server import ForkServer

for number in range(5):
    if os.fork() == 0:
        time.sleep(1 + 0.1 * number)
        os._exit(0)
owner = subprocess.Popen(["true"])
with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
    listening.bind(f"{folder}/listens")
    listening.listen()
    ForkServer(listening, ExitStatuses(Path(folder)), owner.pid).serve()
until = time.monotonic() + 2
while time.monotonic() < until:
    time.sleep(0.05)
"""


def test_forks_that_end_after_the_server_print_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
