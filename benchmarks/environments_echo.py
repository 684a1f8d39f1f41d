"""The echo of `environments.py` as a task of this package."""

import random
from typing import Any

from composer_mesh import Session, Task, Transcript, reward


class EchoSession(Session):
    """Says again what was said."""

    async def opening(self) -> str:
        return "ready"

    async def reply(self, text: str) -> str:
        return text


class Echo(Task):
    """Says again what was said."""

    session_class = EchoSession

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"number": rng.randrange(10**6)}

    def prompt(self, row: Any) -> str:
        return "ready"

    @reward
    async def nothing(self, transcript: Transcript) -> float:
        return 0.0
