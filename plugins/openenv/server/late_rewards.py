"""Rewards that come after an episode has ended, by its id, in a database of all processes.

The last one that was posted for an episode counts.
"""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.plugins.openenv.client.wire import MOST_EPISODE_ID

MOST_REWARDS = 1_000_000
"""Rewards that are kept; the oldest go first."""
REWARDS_OF_AN_ANSWER = 1000
LONGEST_WAIT_S = 60.0
POLL_S = 0.5
NAME = "CREATE TABLE IF NOT EXISTS store (number INTEGER PRIMARY KEY, name TEXT NOT NULL)"
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS rewards (number INTEGER PRIMARY KEY AUTOINCREMENT, "
    "episode_id TEXT NOT NULL UNIQUE, reward REAL NOT NULL, source TEXT NOT NULL, "
    "posted REAL NOT NULL)"
)


class EpisodeReward(BaseModel):
    """A reward for an episode; `source` says who gives it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    episode_id: str = Field(min_length=1, max_length=MOST_EPISODE_ID)
    reward: float = Field(allow_inf_nan=False)
    source: str = Field(default="", max_length=200)


class RewardFile:
    """The rewards in one file; each call opens it anew, so it may be made on any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(self._opened()) as file, file:
            file.execute(SCHEMA)
            file.execute(NAME)
            file.execute("INSERT OR IGNORE INTO store VALUES (1, ?)", (uuid4().hex,))

    async def get(self, episode_id: str, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Return the reward of an episode. Waits up to `wait_s` for it; None without one."""
        until = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        while (found := await asyncio.to_thread(self._get, episode_id)) is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(POLL_S, left))
        return found

    def after(self, number: int) -> dict[str, Any]:
        """Return the first rewards of those posted after one, by its number, in order.

        Numbers are those of one file, which has a name of its own.
        """
        with closing(self._opened()) as file:
            (name,) = file.execute("SELECT name FROM store").fetchone()
            rows = file.execute(
                "SELECT number, episode_id, reward, source, posted FROM rewards WHERE number > ? "
                "ORDER BY number LIMIT ?",
                (number, REWARDS_OF_AN_ANSWER),
            ).fetchall()
        names = ("number", "episode_id", "reward", "source", "posted")
        return {"store": name, "rewards": [dict(zip(names, row, strict=True)) for row in rows]}

    def post(self, late: EpisodeReward) -> None:
        """Keep a reward; durable when it returns."""
        values = (late.episode_id, late.reward, late.source, time.time())
        with closing(self._opened()) as file, file:
            file.execute(
                "INSERT OR REPLACE INTO rewards (episode_id, reward, source, posted) "
                "VALUES (?, ?, ?, ?)",
                values,
            )
            file.execute(
                "DELETE FROM rewards WHERE number <= (SELECT MAX(number) FROM rewards) - ?",
                (MOST_REWARDS,),
            )

    def _get(self, episode_id: str) -> dict[str, Any] | None:
        with closing(self._opened()) as file:
            row = file.execute(
                "SELECT reward, source, posted FROM rewards WHERE episode_id = ?", (episode_id,)
            ).fetchone()
        if row is None:
            return None
        reward, source, posted = row
        return {"episode_id": episode_id, "reward": reward, "source": source, "posted": posted}

    def _opened(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10)
