"""One-time migration of a run directory that predates the store, when opened for writing.

    traces/traces.jsonl                  -> groups and their files
    pairs/pairs.jsonl, late.sqlite       -> pairs, late rewards
    metrics, evaluations, poisoned       -> rows; the files stay, as copies

All rows are one transaction; then the old files move to `migrated/`, and none is deleted. Migrated
steps have no manifests: a run resumes from its newest checkpoint and cannot repeat earlier steps.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoints.manifest import to_disk
from composer_mesh.actors.sqlite_file import FileKind, SqliteFile
from composer_mesh.rollouts.pairs import pair_from_json
from composer_mesh.rollouts.traces import trace_from_json
from composer_mesh.services.directory.report import EVALUATIONS_FILE, METRICS_FILE
from composer_mesh.services.store.records import RunRecords
from composer_mesh.services.store.schema import COLUMNS

FOLDER = "migrated"
TRACES_FILE = "traces/traces.jsonl"
PAIRS_FILE = "pairs/pairs.jsonl"
LATE_FILE = "late.sqlite"
POISONED_FILE = "poisoned.jsonl"
MOVED = (TRACES_FILE, PAIRS_FILE, LATE_FILE)
BEFORE = (*MOVED, METRICS_FILE, EVALUATIONS_FILE, POISONED_FILE)

LATE = FileKind(
    purpose="be migrated",
    repair="move it away, which gives up the late pairs and rewards of the run",
    application_id=0x434D4C52,
    version=1,
    tables=(),
)
NEW_PAIR = (
    "INSERT OR IGNORE INTO pairs (pair_id, group_id, version, state, step, body) VALUES "
    "(?, (SELECT group_id FROM traces WHERE trace_id = ?), ?, ?, ?, ?)"
)


def migrate(root: Path, records: RunRecords, prompts_per_step: int) -> list[str]:
    """Migrate an older run into the store; return the moved files, none if it is not older."""
    if _is_empty(records) and any((root / name).exists() for name in BEFORE):
        with records.file.transaction():
            done = _add_steps(root, records)
            _add_groups(root, records, prompts_per_step, done)
            _add_late(root, records)
            _add_pairs(root, records, prompts_per_step)
            _add_bodies(root, records)
    return [name for name in MOVED if _move(root, name)]


def _is_empty(records: RunRecords) -> bool:
    tables = ("groups", "steps", "evaluations", "poisoned", "pairs")
    with records.file.reading() as rows:
        counts = [rows.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables]
    return not any(counts)


def _add_steps(root: Path, records: RunRecords) -> int:
    """Store the metrics of each step; return the number of trained steps."""
    lines = list(_lines(root / METRICS_FILE))
    with records.file.transaction() as rows:
        for line in lines:
            rows.execute(
                "INSERT INTO steps (step, state, recipe, metrics) VALUES (?, 'done', ?, ?)",
                (json.loads(line)["step"] - 1, b"", line),
            )
    return len(lines)


def _add_groups(root: Path, records: RunRecords, prompts_per_step: int, done: int) -> None:
    traces = map(trace_from_json, _lines(root / TRACES_FILE))
    train = (trace for trace in traces if trace.split == "train")
    for group_id, together in groupby(train, lambda trace: trace.group_id):
        kept = records.stored(group_id) or []
        records.add_group(group_id, [*kept, *together])
    with records.file.transaction() as rows:
        rows.execute(
            "UPDATE groups SET state = 'trained', trained = group_id / :size + 1 "
            "WHERE group_id / :size < :done",
            {"size": prompts_per_step, "done": done},
        )


def _add_late(root: Path, records: RunRecords) -> None:
    if not (root / LATE_FILE).exists():
        return
    late = SqliteFile(root / LATE_FILE, LATE, read_only=True)
    try:
        with late.reading() as found:
            pairs = found.execute("SELECT state, step, body FROM pairs ORDER BY place").fetchall()
            rewards = found.execute(f"SELECT {COLUMNS['rewards']} FROM rewards").fetchall()
    finally:
        late.close()
    with records.file.transaction() as rows:
        rows.executemany(NEW_PAIR, [_pair_row(body, state, step) for state, step, body in pairs])
        insert = f"INSERT INTO rewards ({COLUMNS['rewards']}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        rows.executemany(insert, rewards)


def _add_pairs(root: Path, records: RunRecords, prompts_per_step: int) -> None:
    """Store the pairs of a run without late ones: each was trained with its own group."""
    with records.file.transaction() as rows:
        for line in _lines(root / PAIRS_FILE):
            rows.execute(NEW_PAIR, _pair_row(line, "trained", None))
        rows.execute(
            "UPDATE pairs SET step = group_id / ? WHERE state = 'trained' AND step IS NULL",
            (prompts_per_step,),
        )


def _pair_row(body: bytes, state: str, step: int | None) -> tuple[Any, ...]:
    pair = pair_from_json(body)
    return (pair.pair_id, pair.trace_id, pair.rejected_version, state, step, body)


def _add_bodies(root: Path, records: RunRecords) -> None:
    for line in _lines(root / EVALUATIONS_FILE):
        records.add_evaluation(json.loads(line)["step"], line)
    for line in _lines(root / POISONED_FILE):
        records.add_poisoned(line)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file; an incomplete last one is skipped."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and line.strip():
                yield line[:-1]


def _move(root: Path, name: str) -> bool:
    """Move an old file, and a database's log, to `migrated/`; return whether it existed."""
    if not (root / name).exists():
        return False
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    for path in [*root.glob(f"{name}-*"), root / name]:
        path.rename(folder / path.name)
    to_disk(folder)
    return True
