"""A server that answers as Hugging Face's jobs do; a job is a process of this machine.

Jobs have the server's folder as their home.
Requests, answers and the stages of a job are those of `huggingface_hub` 2.4's client.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of_the_tests"
NAMESPACE = "tester"


@dataclass
class FakeJob:
    """A job: what was asked for, its process, and what it has printed."""

    number: int
    asked: dict[str, Any]
    process: subprocess.Popen[bytes]
    log: Path
    canceled: bool = False

    @property
    def stage(self) -> str:
        status = self.process.poll()
        if self.canceled:
            return "CANCELED"
        return "RUNNING" if status is None else "ERROR" if status else "COMPLETED"

    def about(self) -> dict[str, Any]:
        return {
            "id": f"job{self.number}",
            "createdAt": "2026-11-25T10:00:00.000Z",
            "dockerImage": self.asked.get("dockerImage"),
            "command": self.asked["command"],
            "environment": self.asked["environment"],
            "flavor": self.asked["flavor"],
            "owner": {"id": "1", "name": NAMESPACE, "type": "user"},
            "status": {"stage": self.stage, "message": None},
        }

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class FakeHfJobs:
    """The state of the server: jobs by identity, and how many requests are to fail."""

    folder: Path
    url: str = ""
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    refuse_after: int | None = None
    """Number of jobs after which a start is refused."""
    failing: int = 0
    """Requests about jobs that are answered by 503."""
    without: tuple[str, ...] = ()
    """Variables of this process that jobs do not get."""

    def start(self, asked: dict[str, Any]) -> FakeJob | None:
        if self.refuse_after is not None and len(self.jobs) >= self.refuse_after:
            return None
        number = len(self.jobs)
        log = self.folder / f"job{number}.log"
        inherited = {key: value for key, value in os.environ.items() if key not in self.without}
        given = asked["environment"] | asked.get("secrets", {})
        with log.open("wb") as out:
            process = subprocess.Popen(
                asked["command"],
                env=inherited | {"HOME": str(self.folder)} | given,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job = FakeJob(number, asked, process, log)
        self.jobs[f"job{number}"] = job
        return job


class Handler(BaseHTTPRequestHandler):
    """Answers the client of `fake`."""

    fake: FakeHfJobs
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._is_stranger():
            return
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[-1] == "whoami-v2":
            self._answer(200, {"name": NAMESPACE, "type": "user"})
        elif self.fake.failing > 0:
            self.fake.failing -= 1
            self._answer(503, {"error": "overloaded"})
        elif parts[:3] == ["api", "jobs", NAMESPACE] and parts[3] in self.fake.jobs:
            job = self.fake.jobs[parts[3]]
            if parts[4:] == ["logs"]:
                self._logs(job)
            else:
                self._answer(200, job.about())
        else:
            self._answer(404, {"error": "not found"})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        if self._is_stranger():
            return
        parts = self.path.strip("/").split("/")
        if parts[-1] == "cancel" and self.fake.failing > 0:
            self.fake.failing -= 1
            self._answer(503, {"error": "overloaded"})
            return
        if parts[-1] == "cancel":
            job = self.fake.jobs[parts[3]]
            job.canceled = job.process.poll() is None
            job.kill()
            self._answer(200, job.about())
            return
        job_started = self.fake.start(json.loads(body))
        if job_started is None:
            self._answer(402, {"error": "no credit is left"})
        else:
            self._answer(200, job_started.about())

    def _is_stranger(self) -> bool:
        known = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not known:
            self._answer(401, {"error": "Invalid credentials"})
        return not known

    def _logs(self, job: FakeJob) -> None:
        lines = job.log.read_text(errors="replace").splitlines()
        said = [
            "data: " + json.dumps({"data": line, "timestamp": "2026-11-25T10:00:00Z"}) + "\n\n"
            for line in lines
        ]
        self._send(200, "text/event-stream", "".join(said).encode())

    def _answer(self, status: int, about: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(about).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def hf_jobs_server(folder: Path) -> Iterator[FakeHfJobs]:
    """Serve on loopback for a block; its jobs end with it."""
    fake = FakeHfJobs(folder)

    class Bound(Handler):
        pass

    Bound.fake = fake
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        for job in fake.jobs.values():
            job.kill()
        server.shutdown()
        server.server_close()
        thread.join()
