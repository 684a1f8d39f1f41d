"""An actor that counts what reaches it, and that has to be loaded."""

from __future__ import annotations

import asyncio
import os

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor


class CountingActor(MeshActor):
    """Knows how many calls it had at once, and what was said in which session."""

    def __init__(self) -> None:
        self.word: str | None = None
        self.now = self.most = 0
        self.said: dict[str, list[str]] = {}

    @concurrent_endpoint
    async def load(self, word: str) -> None:
        self.word = word

    @concurrent_endpoint
    async def work(self, number: int) -> tuple[int, int]:
        if self.word is None:
            raise RuntimeError("not loaded: call load first")
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(20):
            await asyncio.sleep(0)
        self.now -= 1
        return number, os.getpid()

    @concurrent_endpoint
    async def say(self, session: str, text: str) -> list[str]:
        self.said.setdefault(session, []).append(text)
        return self.said[session]

    @concurrent_endpoint
    async def peak(self) -> int:
        return self.most
