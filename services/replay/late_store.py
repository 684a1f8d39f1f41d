"""What came after its rollouts were trained on: pairs and rewards that wait for a step.

One SQLite file of a run, which other processes may post rewards to while the run goes on. On disk
when a call returns, so it survives a restart. What a pair or a reward is worth is not known here.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.sqlite_file import FileKind, SqliteFile
from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json, pair_to_json

LATE_FILE = "late.sqlite"
KIND = FileKind(
    purpose="keep late pairs and rewards",
    repair="move it away, or free the disk",
    application_id=0x434D4C52,
    version=1,
    tables=(
        "CREATE TABLE pairs (place INTEGER PRIMARY KEY, pair_id TEXT NOT NULL UNIQUE, "
        "version INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'waiting', step INTEGER, "
        "body BLOB NOT NULL)",
        "CREATE TABLE rewards (place INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, "
        "reward REAL NOT NULL, source TEXT NOT NULL, posted REAL NOT NULL, "
        "state TEXT NOT NULL DEFAULT 'waiting', step INTEGER)",
        "CREATE INDEX waiting_pairs ON pairs (state, place)",
        "CREATE INDEX waiting_rewards ON rewards (state, place)",
    ),
    synchronous="FULL",
)


REWIND = (
    "UPDATE pairs SET state = 'waiting', step = NULL WHERE state != 'waiting' AND step >= ?",
    "UPDATE rewards SET state = 'waiting', step = NULL WHERE state != 'waiting' AND step >= ?",
)


@dataclass(frozen=True, slots=True)
class LateReward:
    """A posted reward; `place` is its number in the store."""

    place: int
    trace_id: str
    reward: float
    source: str


class LateStore:
    """Opened by its constructor, closed by `close`. One step loop takes; anyone may post."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, KIND)

    def close(self) -> None:
        self._file.close()

    def add_pairs(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Keep pairs until a step takes them; returns those that were not there before."""
        insert = "INSERT OR IGNORE INTO pairs (pair_id, version, body) VALUES (?, ?, ?)"
        fresh: list[PreferencePair] = []
        with self._file.transaction() as rows:
            for pair in pairs:
                values = (pair.pair_id, pair.rejected_version, pair_to_json(pair))
                if rows.execute(insert, values).rowcount:
                    fresh.append(pair)
        return fresh

    def take_pairs(self, step: int, max_age: int, limit: int) -> tuple[list[PreferencePair], int]:
        """The oldest waiting pairs for this step, and how many have become too old meanwhile."""
        with self._file.transaction() as rows:
            expired = rows.execute(
                "UPDATE pairs SET state = 'expired', step = ? "
                "WHERE state = 'waiting' AND ? - version > ?",
                (step, step, max_age),
            ).rowcount
            found = rows.execute(
                "SELECT place, body FROM pairs WHERE state = 'waiting' ORDER BY place LIMIT ?",
                (limit,),
            ).fetchall()
            rows.executemany(
                "UPDATE pairs SET state = 'trained', step = ? WHERE place = ?",
                [(step, place) for place, _ in found],
            )
        return [pair_from_json(body) for _, body in found], expired

    def waiting_pairs(self) -> int:
        """Pairs that no step has taken."""
        with self._file.reading() as rows:
            count = rows.execute("SELECT COUNT(*) FROM pairs WHERE state = 'waiting'").fetchone()
        return int(count[0])

    def post_reward(self, trace_id: str, reward: float, source: str) -> None:
        """Keep a reward until the run reads it; the last one for a trace counts."""
        with self._file.transaction() as rows:
            rows.execute(
                "INSERT INTO rewards (trace_id, reward, source, posted) VALUES (?, ?, ?, ?)",
                (trace_id, reward, source, time.time()),
            )

    def rewards(self) -> list[LateReward]:
        """The waiting rewards in the order in which they were posted."""
        with self._file.reading() as rows:
            found = rows.execute(
                "SELECT place, trace_id, reward, source FROM rewards WHERE state = 'waiting' "
                "ORDER BY place"
            ).fetchall()
        return [LateReward(*row) for row in found]

    def settle_rewards(self, rewards: Sequence[LateReward], step: int, state: str) -> None:
        """Note what became of some rewards in a step: `trained` or `expired`."""
        with self._file.transaction() as rows:
            rows.executemany(
                "UPDATE rewards SET state = ?, step = ? WHERE place = ?",
                [(state, step, reward.place) for reward in rewards],
            )

    def forget_pairs(self, pair_ids: Iterable[str]) -> None:
        """Drop pairs whose rollouts will be sampled again."""
        with self._file.transaction() as rows:
            rows.executemany(
                "DELETE FROM pairs WHERE pair_id = ?", [(pair_id,) for pair_id in pair_ids]
            )

    def rewind(self, step: int) -> None:
        """What this step and later ones took waits again: they will be trained once more."""
        with self._file.transaction() as rows:
            for statement in REWIND:
                rows.execute(statement, (step,))
