"""An actor without torch, which starts fast."""

from __future__ import annotations

import asyncio
import os
import time

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.progress import made_progress


class Bad(Exception):
    """An exception of an endpoint that travels."""


class Stubborn(Exception):
    """An exception that cannot be rebuilt on the other side."""

    def __init__(self, *, value: int) -> None:
        super().__init__(f"value is {value}")


class EchoActor(MeshActor):
    """Answers, fails or waits, as it is told."""

    kind = "echo"

    def __init__(self, word: str = "echo", fail: bool = False) -> None:
        if fail:
            raise ValueError("this actor was told to fail")
        self.word = word
        self.gate = asyncio.Event()

    @concurrent_endpoint
    async def say(self, text: str) -> str:
        return f"{self.word} {text}"

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def parent(self) -> int:
        return os.getppid()

    @concurrent_endpoint
    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @concurrent_endpoint
    async def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    @concurrent_endpoint
    async def hold(self) -> int:
        await self.gate.wait()
        return os.getpid()

    @concurrent_endpoint
    async def start_child(self) -> int:
        """The id of a process that outlives whoever does not end it."""
        child = await asyncio.create_subprocess_exec("sleep", "600")
        return child.pid

    @concurrent_endpoint
    async def work(self, parts: int, each_s: float) -> None:
        """Complete some parts, and then hang."""
        for part in range(1, parts + 1):
            await asyncio.to_thread(time.sleep, each_s)
            made_progress(f"part {part} of {parts + 1}")
        await self.gate.wait()

    @concurrent_endpoint
    async def spin(self, seconds: float) -> None:
        """Work as actors do: in a thread."""
        await asyncio.to_thread(time.sleep, seconds)

    @concurrent_endpoint
    async def sleep_on_loop(self, seconds: float) -> None:
        """Wait as no actor should: on its event loop."""
        time.sleep(seconds)  # noqa: ASYNC251

    @concurrent_endpoint
    async def release(self) -> None:
        self.gate.set()

    @concurrent_endpoint
    async def fail(self, how: str) -> None:
        raise Bad("on", "purpose") if how == "bad" else Stubborn(value=3)
