"""An S3 server on this machine for a test or a benchmark: moto, in an environment of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

PROGRAM_ENV = "COMPOSER_MESH_TEST_S3"
BUCKET = "islands"
START_S = 60.0


def s3_program() -> Path | None:
    """Return the installed moto_server; None if there is none (`nox -s islands`)."""
    given = os.environ.get(PROGRAM_ENV)
    default = Path(__file__).parents[1] / ".nox" / "islands" / "bin" / "moto_server"
    program = Path(given) if given else default
    return program if program.exists() else None


@contextmanager
def s3_server(program: Path, log: Path) -> Iterator[dict[str, str]]:
    """Run a server with one bucket; yield the environment variables of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        _make_bucket(address, server, log)
        yield {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def _make_bucket(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            httpx.put(f"{address}/{BUCKET}").raise_for_status()
            return
        except httpx.TransportError:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no S3 server at {address}: {log.read_text()}") from None
            time.sleep(0.1)
