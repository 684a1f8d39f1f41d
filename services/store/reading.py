"""Reading the store of a run, while it goes on or afterwards, in this process or in another one.

Changes nothing and is waited for by nobody. A row or a file that is not what was written raises
DamagedRecord and is never returned. What groups and steps mean is `rows`.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from composer_mesh.actors.sqlite_file import SqliteFile
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.store.group_files import read_group
from composer_mesh.services.store.index import index_query
from composer_mesh.services.store.rows import (
    DamagedRecord,
    GroupRow,
    GroupState,
    ItemState,
    LateReward,
    PairRow,
    StepRow,
    StepState,
    StoreMissing,
    TeacherQueryRow,
    TraceRow,
    Where,
)
from composer_mesh.services.store.schema import COLUMNS, KIND, STORE_FILE, whole

PAGE = 64
REPAIR = "train --resume moves it to quarantine/, or says what cannot go on without it"
Values = tuple[Any, ...]


class RunReader:
    """One run's store, as a context manager. Raises StoreMissing where a directory has none."""

    def __init__(self, root: Path) -> None:
        self._root = root
        if not (root / STORE_FILE).is_file():
            raise StoreMissing(
                f"{root} has no {STORE_FILE}: name the directory of a run that has begun; one of "
                "an older version gets it when it is resumed"
            )
        self.file = SqliteFile(root / STORE_FILE, KIND, read_only=True)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def groups(self, state: GroupState | None = None) -> list[GroupRow]:
        """The groups in the order of their ids."""
        found = self._found("groups", "? IS NULL OR state = ?", (state, state), "group_id")
        return [_group(row) for row in found]

    def group(self, group_id: int) -> GroupRow | None:
        """One group, None where it has not entered."""
        found = self._found("groups", "group_id = ?", (group_id,), "group_id")
        return _group(found[0]) if found else None

    def traces(self, group_id: int) -> list[Trace]:
        """The rollouts of a group; raises DamagedRecord where its file is not what was written."""
        row = self.group(group_id)
        if row is None or not row.traces:
            return []
        return read_group(self._root, group_id, row.bytes, row.crc)

    def all_traces(self) -> Iterator[Trace]:
        """Every rollout that can be read, group by group; raises as `traces`."""
        for row in self.groups():
            yield from self.traces(row.group_id)

    def rows(
        self,
        where: Where | None = None,
        sort: str = "group_id",
        descending: bool = False,
        limit: int | None = None,
    ) -> Iterator[TraceRow]:
        """The index of the rollouts, sorted by a field; equal ones in the order of their groups.

        Raises ValueError where `sort` is no field of a TraceRow.
        """
        for row in self._all(*index_query(where or Where(), sort, descending, limit)):
            yield _trace_row(_intact("traces", row))

    def worded(self, group_id: int) -> bytes | None:
        """What the hint writer said about a group, None where it was not asked."""
        found = self._found("groups", "group_id = ?", (group_id,), "group_id")
        return found[0][8] if found else None

    def asked(self) -> Iterator[TeacherQueryRow]:
        """The groups that teachers were asked about, in the order of their ids."""
        for group_id, body in self._paged("asked"):
            ids = self._all(
                "SELECT pair_id FROM pairs WHERE group_id = ? AND state != 'superseded' "
                "ORDER BY place",
                (group_id,),
            )
            yield TeacherQueryRow(group_id, body, tuple(row[0] for row in ids))

    def steps(self, since: int = 0, superseded: bool = False) -> Iterator[StepRow]:
        """The steps from `since` on, as they were planned; those that count, or all."""
        tests = "step >= ? AND (? OR state != 'superseded')"
        for _, step, state, manifest, line in self._paged("steps", tests, (since, superseded)):
            yield StepRow(step, manifest, line and json.loads(line), StepState(state))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics of the steps that count, as in `metrics.jsonl`."""
        return (step.metrics for step in self.steps() if step.metrics is not None)

    def pairs(
        self, state: ItemState | None = None, ids: Iterable[str] | None = None
    ) -> Iterator[PairRow]:
        """The pairs in the order in which they came; with `ids` those of these, in their order.

        Of pairs that are asked for by their ids those that are superseded are left out, and so are
        unknown ones.
        """
        if ids is None:
            for row in self._paged("pairs", "? IS NULL OR state = ?", (state, state)):
                yield _pair(row)
            return
        tests = "pair_id = ? AND state != 'superseded'"
        for pair_id in ids:
            yield from map(_pair, self._found("pairs", tests, (pair_id,), "place"))

    def waiting_pairs(self) -> int:
        """Pairs that no step has taken."""
        return int(self._all("SELECT COUNT(*) FROM pairs WHERE state = 'waiting'")[0][0])

    def rewards(self, state: ItemState | None = ItemState.WAITING) -> list[LateReward]:
        """The late rewards in the order in which they were posted; None is all of them."""
        found = self._found("rewards", "? IS NULL OR state = ?", (state, state), "place")
        return [
            LateReward(place, trace_id, reward, source, ItemState(now), step)
            for place, trace_id, reward, source, _, now, step in found
        ]

    def evaluations(self) -> list[Evaluation]:
        """The evaluations that count, in the order in which they were made."""
        found = self._paged("evaluations", "state != 'superseded'")
        return [Evaluation(**json.loads(row[3])) for row in found]

    def poisoned(self) -> list[dict[str, Any]]:
        """The episodes that were set aside, as in `poisoned.jsonl`."""
        return [json.loads(body) for _, body in self._paged("poisoned")]

    def _paged(self, table: str, tests: str = "TRUE", values: Values = ()) -> Iterator[Values]:
        """Rows by their first column, a page at a time: bodies may be more than memory holds."""
        key, last = COLUMNS[table].partition(",")[0], -1
        page = f"({tests}) AND {key} > ?"
        while found := self._found(table, page, (*values, last), f"{key} LIMIT {PAGE}"):
            yield from found
            last = found[-1][0]

    def _found(self, table: str, tests: str, values: Values, order: str) -> list[Values]:
        select = f"SELECT {COLUMNS[table]}, {whole(table)} FROM {table} WHERE {tests}"
        return [_intact(table, row) for row in self._all(f"{select} ORDER BY {order}", values)]

    def _all(self, select: str, values: Values = ()) -> list[Values]:
        with self.file.reading() as rows:
            return list(rows.execute(select, values).fetchall())


def _intact(table: str, row: Values) -> Values:
    """A row without the last column, which says whether it is as it was written."""
    *values, intact = row
    if not intact:
        where = f"{STORE_FILE}, table {table}, row {values[0]}"
        raise DamagedRecord(where, "its checksum is that of another row", REPAIR)
    return tuple(values)


def _group(row: Values) -> GroupRow:
    return GroupRow(row[0], GroupState(row[1]), *row[2:8])


def _trace_row(row: Values) -> TraceRow:
    values = dict(zip(TraceRow.__slots__, row, strict=True))
    values["success"] = bool(values["success"])
    values["error_kinds"] = tuple(json.loads(values["error_kinds"]))
    return TraceRow(**values | {"state": GroupState(values["state"])})


def _pair(row: Values) -> PairRow:
    _, pair_id, group_id, version, state, step, body = row
    return PairRow(pair_id, group_id, version, ItemState(state), step, body)
