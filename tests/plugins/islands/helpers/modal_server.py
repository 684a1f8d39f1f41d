"""A gRPC server that answers as Modal's does; a sandbox is a process of this machine.

Sandboxes have the server's folder as their home. Requests and answers are those of the client of
`modal` 1.6; every other call is answered with UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpclib
import pytest
from grpclib.const import Status
from grpclib.events import RecvRequest, listen
from grpclib.server import Server, Stream
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

TOKEN_ID, TOKEN_SECRET = "ak-of-the-tests", "as-of-the-tests"
APP = "ap-1"
OF_SANDBOXES = ("SandboxWait", "SandboxTerminate", "SandboxGetTaskId")


@dataclass
class FakeSandbox:
    """A sandbox: what was asked for, its process, and what it has printed."""

    definition: api_pb2.Sandbox
    tags: dict[str, str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes]
    log: Path
    ended: Any = None
    """A status of `GenericResult` in place of the one of the process."""

    @property
    def result(self) -> api_pb2.GenericResult:
        status = self.process.poll()
        if self.ended is not None:
            return api_pb2.GenericResult(status=self.ended)
        if status is None:
            return api_pb2.GenericResult()
        failed = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
        word = failed if status else api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        return api_pb2.GenericResult(status=word, exitcode=abs(status))

    def end(self, status: Any = None) -> None:
        """Kill the process; `status` is what the service says of it then."""
        if self.process.poll() is None:
            self.ended = status
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class FakeModal:
    """The state of the server: sandboxes by identity, and which requests are to fail."""

    folder: Path
    url: str = ""
    sandboxes: dict[str, FakeSandbox] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    refuse_after: int | None = None
    """Number of sandboxes after which a start is refused."""
    failing: bool = False
    """Whether requests about sandboxes are answered with an error that no retry mends."""
    without: tuple[str, ...] = ()
    """Variables of this process that sandboxes do not get."""

    def start(self, asked: Any, given: dict[str, str], identity: str) -> FakeSandbox:
        """Start a sandbox; raises the error of a workspace without credit."""
        if self.refuse_after is not None and len(self.sandboxes) >= self.refuse_after:
            raise grpclib.GRPCError(Status.RESOURCE_EXHAUSTED, "no credit is left")
        inherited = {key: value for key, value in os.environ.items() if key not in self.without}
        log = self.folder / f"sandbox{len(self.sandboxes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(asked.definition.entrypoint_args),
                env=inherited | {"HOME": str(self.folder)} | given,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        tags = {one.tag_name: one.tag_value for one in asked.tags}
        self.sandboxes[identity] = FakeSandbox(asked.definition, tags, given, process, log)
        return self.sandboxes[identity]

    @property
    def started(self) -> list[FakeSandbox]:
        """All sandboxes, in the order of their start."""
        return list(self.sandboxes.values())


async def _unimplemented(self: Any, stream: Stream[Any, Any]) -> None:
    raise grpclib.GRPCError(Status.UNIMPLEMENTED, "the tests' server does not know this call")


_Rest: Any = type(
    "_Rest", (ModalClientBase,), dict.fromkeys(ModalClientBase.__abstractmethods__, _unimplemented)
)


class Service(_Rest):  # type: ignore[misc]
    """Answers the calls that starting and following sandboxes make."""

    def __init__(self, fake: FakeModal) -> None:
        self.fake = fake

    async def ClientHello(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=_token()))

    async def AppGetOrCreate(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        self.fake.environments.append(asked.environment_name)
        about = api_pb2.AppHandleMetadata(description=asked.app_name, app_id=APP)
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id=APP, handle_metadata=about))

    async def EnvironmentGetOrCreate(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        await stream.send_message(
            api_pb2.EnvironmentGetOrCreateResponse(
                environment_id="en-1",
                metadata=api_pb2.EnvironmentMetadata(name="main", settings=settings),
            )
        )

    async def ImageGetOrCreate(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        self.fake.images.append(asked.image.dockerfile_commands[0])
        built = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(
            api_pb2.ImageGetOrCreateResponse(
                image_id="im-1", result=built, metadata=api_pb2.ImageMetadata()
            )
        )

    async def SecretGetOrCreate(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        identity = f"st-{len(self.fake.secrets)}"
        self.fake.secrets[identity] = dict(asked.env_dict)
        await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=identity))

    async def VolumeGetOrCreate(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        self.fake.volumes.append(asked.deployment_name)
        about = api_pb2.VolumeMetadata(name=asked.deployment_name)
        await stream.send_message(
            api_pb2.VolumeGetOrCreateResponse(volume_id="vo-1", metadata=about)
        )

    async def SandboxCreate(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        given: dict[str, str] = {}
        for identity in asked.definition.secret_ids:
            given |= self.fake.secrets[identity]
        identity = f"sb-{len(self.fake.sandboxes):022d}"
        self.fake.start(asked, given, identity)
        await stream.send_message(
            api_pb2.SandboxCreateResponse(sandbox_id=identity, metadata=_about())
        )

    async def SandboxCreateV2(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        given: dict[str, str] = {}
        for source in asked.secret_sources:
            given |= self.fake.secrets.get(source.secret_id, {}) | dict(source.env.contents)
        identity = f"sb-2-{len(self.fake.sandboxes)}"
        self.fake.start(asked, given, identity)
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=identity, task_id=f"ta-{identity}", metadata=_about()
            )
        )

    async def SandboxGetTaskId(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        self._of(asked.sandbox_id)
        await stream.send_message(
            api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{asked.sandbox_id}")
        )

    async def SandboxWait(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        sandbox = self._of(asked.sandbox_id)
        await stream.send_message(
            api_pb2.SandboxWaitResponse(result=sandbox.result, metadata=_about())
        )

    async def SandboxTerminate(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        self._of(asked.sandbox_id).end(api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
        await stream.send_message(api_pb2.SandboxTerminateResponse())

    SandboxGetTaskIdV2, SandboxWaitV2 = SandboxGetTaskId, SandboxWait
    SandboxTerminateV2 = SandboxTerminate

    async def AppFetchLogs(self, stream: Stream[Any, Any]) -> None:
        asked = await stream.recv_message()
        sandbox = self._of(asked.task_id.removeprefix("ta-"))
        lines = sandbox.log.read_text(errors="replace").splitlines(keepends=True)
        items = [api_pb2.TaskLogs(data=line, file_descriptor=1) for line in lines[-asked.limit :]]
        batch = api_pb2.TaskLogsBatch(task_id=asked.task_id, items=items)
        await stream.send_message(api_pb2.AppFetchLogsResponse(batches=[batch]))

    def _of(self, identity: str) -> FakeSandbox:
        if identity not in self.fake.sandboxes:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"sandbox {identity} is not known")
        return self.fake.sandboxes[identity]


def _about() -> api_pb2.SandboxHandleMetadata:
    return api_pb2.SandboxHandleMetadata(app_id=APP)


def _token() -> str:
    """Return a token of an hour, whose middle the client reads."""
    about = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3600}).encode())
    return f"e30.{about.decode().rstrip('=')}.x"


@contextmanager
def modal_server(folder: Path) -> Iterator[FakeModal]:
    """Serve on loopback for a block; its sandboxes end with it."""
    fake = FakeModal(folder)

    async def check(request: RecvRequest) -> None:
        known = (
            request.metadata.get("x-modal-token-id"),
            request.metadata.get("x-modal-token-secret"),
        )
        if known != (TOKEN_ID, TOKEN_SECRET):
            raise grpclib.GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")
        name = request.method_name.rpartition("/")[2].removesuffix("V2")
        if fake.failing and name in OF_SANDBOXES:
            raise grpclib.GRPCError(Status.FAILED_PRECONDITION, "overloaded")

    ready, loop = threading.Event(), asyncio.new_event_loop()
    ends: list[Callable[[], None]] = []

    async def serve() -> None:
        server = Server([Service(fake)])
        listen(server, RecvRequest, check)
        await server.start("127.0.0.1", 0)
        listening: Any = server._server
        fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ends.append(server.close)
        ready.set()
        await server.wait_closed()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30), "the server has not started"
    try:
        yield fake
    finally:
        for sandbox in fake.started:
            sandbox.end()
        loop.call_soon_threadsafe(ends[0])
        thread.join(30)
        loop.close()


def use(fake: FakeModal, monkeypatch: pytest.MonkeyPatch, secret: str = TOKEN_SECRET) -> Any:
    """Return the SDK's client of a server; commands that tests start find it too."""
    from modal import Client

    monkeypatch.setenv("MODAL_SERVER_URL", fake.url)
    monkeypatch.setenv("MODAL_TOKEN_ID", TOKEN_ID)
    monkeypatch.setenv("MODAL_TOKEN_SECRET", secret)
    return Client.from_credentials(TOKEN_ID, secret)
