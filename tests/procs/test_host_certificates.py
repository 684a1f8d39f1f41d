"""A worker of Monarch that listens on tls: who is of the run attaches, and nobody else does."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_port import kept_port

from composer_mesh.mesh.hosts.address import join, process_address
from composer_mesh.mesh.hosts.certificates import make_authority, tls_environment

HOST = "127.0.0.1"
SERVE = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""
ATTACH = """
import os, sys
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

class Echo(Actor):
    @endpoint
    def name(self) -> str:
        return "from the worker"

enable_transport("tls://127.0.0.1:0")
mesh = attach_to_workers(name="run", workers=[sys.argv[1]], ca="trust_all_connections")
mesh.initialized.get(timeout=60)
print(mesh.spawn_procs(per_host={"n": 1}).spawn("echo", Echo).name.call_one().get(timeout=60))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """The certificate of a process of the run."""
    make_authority(tmp_path / "run")
    return tls_environment(tmp_path / "run", tmp_path / "own", [HOST])


@pytest.fixture
def port(own: dict[str, str]) -> Iterator[int]:
    """The port of a worker to which a process of the run has attached."""
    with kept_port() as port:
        address, env = process_address(join("tls", HOST, port)), {**os.environ, **own}
        worker = subprocess.Popen([sys.executable, "-c", SERVE, address], env=env)
        try:
            client = [sys.executable, "-c", ATTACH, address]
            done = subprocess.run(client, env=env, capture_output=True, text=True, timeout=120)
            assert done.stdout.strip() == "from the worker", done.stderr
            yield port
        finally:
            worker.kill()
            worker.wait()


def test_a_worker_answers_the_run_and_no_stranger(
    port: int, own: dict[str, str], tmp_path: Path
) -> None:
    make_authority(tmp_path / "other")
    foreign = tls_environment(tmp_path / "other", tmp_path / "foreign", [HOST])
    for certificate in (foreign, None):
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.load_verify_locations(own["HYPERACTOR_TLS_CA"])
        if certificate is not None:
            stranger.load_cert_chain(
                certificate["HYPERACTOR_TLS_CERT"], certificate["HYPERACTOR_TLS_KEY"]
            )
        with (
            socket.create_connection((HOST, port), timeout=60) as plain,
            pytest.raises(ssl.SSLError, match=r"(?i)alert|certificate"),
            stranger.wrap_socket(plain, server_hostname=HOST) as line,
        ):
            line.recv(1)


def test_a_worker_that_speaks_tls_ends_a_connection_that_does_not(port: int) -> None:
    with socket.create_connection((HOST, port), timeout=60) as line:
        line.sendall(b"\0" * 64)
        heard = b""
        while more := line.recv(4096):
            heard += more
    assert heard[:1] in (b"", b"\x15")  # nothing, or an alert of TLS
