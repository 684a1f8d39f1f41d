"""Reader of a run's store, concurrent with the run or afterwards, in any process.

Changes nothing and blocks no writer. A row or a file with a wrong checksum raises DamagedRecord and
is never returned. `rows` defines groups, steps and their states.

SQL of the rollout index: its columns and the tests of a `Where`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from composer_mesh.actors.sqlite_file import SqliteFile
from composer_mesh.rollouts.traces import Trace, TurnDivergences
from composer_mesh.services.directory.report import STORE_FILE, Evaluation
from composer_mesh.services.store.group_files import read_group
from composer_mesh.services.store.row_values import (
    Values,
    damaged,
    divergences_row,
    evaluation_row,
    group_row,
    object_row,
    pair_row,
    reward_row,
    step_row,
    teacher_query_row,
    trace_row,
)
from composer_mesh.services.store.rows import (
    GroupRow,
    GroupState,
    IndexTotals,
    ItemState,
    LateReward,
    PairRow,
    StepRow,
    StoreMissing,
    TeacherQueryRow,
    TraceRow,
    Where,
)
from composer_mesh.services.store.schema import COLUMNS, KIND, whole

TRACE_COLUMNS = {
    "trace_id": "traces.trace_id",
    "group_id": "traces.group_id",
    "sample": "sample",
    "task": "task",
    "split": "split",
    "index": "number",
    "reward": "reward",
    "success": "success",
    "turns": "turns",
    "tokens": "tokens",
    "length": "length",
    "error_kinds": "error_kinds",
    "oldest_version": "oldest_version",
    "newest_version": "newest_version",
    "state": "groups.state",
}
"""Columns in the order of a TraceRow's fields."""
SORTED = TRACE_COLUMNS | {"error_sites": "json_array_length(error_kinds)"}

TESTS = {
    "trace_id": "traces.trace_id = ?",
    "group_id": "traces.group_id = ?",
    "step": "groups.trained = ? + 1",
    "split": "split = ?",
    "state": "groups.state = ?",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "success": "success = ?",
    "error": "EXISTS (SELECT 1 FROM json_each(error_kinds) WHERE value = ?)",
}


JOINED = "FROM traces JOIN groups USING (group_id)"
Query = tuple[str, tuple[object, ...]]


def index_query(
    where: Where, sort: str, descending: bool, limit: int | None, offset: int = 0
) -> Query:
    """Return the statement and its values; raise ValueError if `sort` is not a field."""
    if sort not in SORTED:
        raise ValueError(f"sort is {sort!r} but must be one of {', '.join(SORTED)}")
    tests, values = _tests(where)
    direction = "DESC" if descending else "ASC"
    statement = (
        f"SELECT {', '.join(TRACE_COLUMNS.values())}, {whole('traces')} "
        f"{JOINED} WHERE {tests} ORDER BY {SORTED[sort]} {direction}, traces.group_id, sample "
        "LIMIT ? OFFSET ?"
    )
    return statement, (*values, -1 if limit is None else limit, offset)


def totals_query(where: Where) -> Query:
    """Return the statement of the count, the mean reward and the success of matching rollouts."""
    tests, values = _tests(where)
    means = "COUNT(*), COALESCE(AVG(reward), 0.0), COALESCE(AVG(success), 0.0)"
    return f"SELECT {means} {JOINED} WHERE {tests}", values


def errors_query(where: Where) -> Query:
    """Return the statement of the number of error sites by kind, the most frequent first."""
    tests, values = _tests(where)
    return (
        f"SELECT value, COUNT(*) AS sites {JOINED}, json_each(error_kinds) WHERE {tests} "
        "GROUP BY value ORDER BY sites DESC, value LIMIT 1000",
        values,
    )


def _tests(where: Where) -> Query:
    given = {name: value for name in TESTS if (value := getattr(where, name)) is not None}
    return " AND ".join(TESTS[name] for name in given) or "TRUE", tuple(given.values())


PAGE = 64
IDS_OF_A_QUERY = 500
LATEST = "place DESC LIMIT ? OFFSET ?"


class RunReader:
    """Reads one run's store, as a context manager. Raises StoreMissing if there is none."""

    def __init__(self, root: Path) -> None:
        self._root = root
        if not (root / STORE_FILE).is_file():
            raise StoreMissing(
                f"{root} has no {STORE_FILE}: name the directory of a run that has begun"
            )
        self.file = SqliteFile(root / STORE_FILE, KIND, read_only=True)

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def groups(self, state: GroupState | None = None) -> list[GroupRow]:
        """Return the groups in id order."""
        found = self._found("groups", "? IS NULL OR state = ?", (state, state), "group_id")
        return [group_row(row) for row in found]

    def group(self, group_id: int) -> GroupRow | None:
        """Return one group, or None if it has not entered the window."""
        found = self._found("groups", "group_id = ?", (group_id,), "group_id")
        return group_row(found[0]) if found else None

    def traces(self, group_id: int) -> list[Trace]:
        """Return the rollouts of a group; raise DamagedRecord for a missing or modified file."""
        row = self.group(group_id)
        if row is None or not row.traces:
            return []
        return read_group(self._root, group_id, row.bytes, row.crc)

    def all_traces(self) -> Iterator[Trace]:
        """Yield every rollout, group by group; raises as `traces`."""
        for row in self.groups():
            yield from self.traces(row.group_id)

    def rows(
        self,
        where: Where | None = None,
        sort: str = "group_id",
        descending: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> Iterator[TraceRow]:
        """Yield the index of the rollouts, sorted by a field; equal ones in group order.

        The first `offset` of them are left out.

        Raises ValueError if `sort` is not a field of a TraceRow.
        """
        for row in self._all(*index_query(where or Where(), sort, descending, limit, offset)):
            yield trace_row(_intact("traces", row))

    def totals(self, where: Where | None = None) -> IndexTotals:
        """Return the totals of matching rollouts, without a check of each row."""
        ((count, reward, success),) = self._all(*totals_query(where or Where()))
        errors = {str(kind): int(n) for kind, n in self._all(*errors_query(where or Where()))}
        return IndexTotals(int(count), float(reward), float(success), errors)

    def stored(self, trace_ids: Iterable[str]) -> set[str]:
        """Return those trace_ids that are rollouts of the run."""
        found: set[str] = set()
        names = list(trace_ids)
        for first in range(0, len(names), IDS_OF_A_QUERY):
            some = tuple(names[first : first + IDS_OF_A_QUERY])
            marks = ", ".join("?" * len(some))
            rows = self._all(f"SELECT trace_id FROM traces WHERE trace_id IN ({marks})", some)
            found |= {row[0] for row in rows}
        return found

    def hint_writer_output(self, group_id: int) -> bytes | None:
        """Return the hint writer's output for a group, or None if it was not queried."""
        found = self._found("groups", "group_id = ?", (group_id,), "group_id")
        return found[0][8] if found else None

    def teacher_queries(self) -> Iterator[TeacherQueryRow]:
        """Yield the groups with teacher queries, in id order."""
        for group_id, body in self._paged("asked"):
            ids = self._all(
                "SELECT pair_id FROM pairs WHERE group_id = ? AND state != 'superseded' "
                "ORDER BY place",
                (group_id,),
            )
            yield teacher_query_row((group_id, body), tuple(row[0] for row in ids))

    def teacher_query_of(self, group_id: int) -> bytes | None:
        """Return the outcome of a group's teacher queries as JSON, or None without any."""
        found = self._found("asked", "group_id = ?", (group_id,), "group_id")
        return found[0][1] if found else None

    def pairs_of(self, group_id: int) -> list[PairRow]:
        """Return the pairs of a group's rollouts, and those of no group, in insertion order."""
        found = self._found("pairs", "group_id = ? OR group_id IS NULL", (group_id,), "place")
        return [pair_row(row) for row in found]

    def newest_pairs(self, limit: int, offset: int = 0) -> list[PairRow]:
        """Return so many pairs, the newest first; the first `offset` of them are left out."""
        values = (limit, offset)
        return [pair_row(row) for row in self._found("pairs", "TRUE", values, LATEST)]

    def pair_states(self) -> dict[str, int]:
        """Return the number of pairs in each state."""
        return dict(self._all("SELECT state, COUNT(*) FROM pairs GROUP BY state"))

    def errors_of_steps(self, first: int, last: int) -> dict[str, int]:
        """Return the error sites, by kind, of rollouts that steps `first` to `last` have trained.

        Steps count from 0; the key "" holds the number of those rollouts.
        """
        tests = "groups.trained BETWEEN ? + 1 AND ? + 1"
        joined = f"FROM traces JOIN groups USING (group_id) WHERE {tests}"
        sites = "SELECT value, COUNT(*) FROM traces JOIN groups USING (group_id), "
        sites += f"json_each(error_kinds) WHERE {tests} GROUP BY value"
        counts = self._all(f"SELECT '', COUNT(*) {joined}", (first, last))
        return {str(kind): int(n) for kind, n in counts + self._all(sites, (first, last))}

    def steps(self, since: int = 0, superseded: bool = False) -> Iterator[StepRow]:
        """Yield the steps from `since` on, in planned order; superseded ones only if requested."""
        tests = "step >= ? AND (? OR state != 'superseded')"
        yield from map(step_row, self._paged("steps", tests, (since, superseded)))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of steps that are not superseded, as in `metrics.jsonl`."""
        return (step.metrics for step in self.steps() if step.metrics is not None)

    def pairs(
        self, state: ItemState | None = None, ids: Iterable[str] | None = None
    ) -> Iterator[PairRow]:
        """Yield the pairs in insertion order, or those with `ids` in the order of the ids.

        With `ids`, superseded and unknown pairs are omitted.
        """
        if ids is None:
            for row in self._paged("pairs", "? IS NULL OR state = ?", (state, state)):
                yield pair_row(row)
            return
        tests = "pair_id = ? AND state != 'superseded'"
        for pair_id in ids:
            yield from map(pair_row, self._found("pairs", tests, (pair_id,), "place"))

    def waiting_pairs(self) -> int:
        """Return the number of pairs that no step has taken."""
        return int(self._all("SELECT COUNT(*) FROM pairs WHERE state = 'waiting'")[0][0])

    def rewards(self, state: ItemState | None = ItemState.WAITING) -> list[LateReward]:
        """Return the late rewards in the order of posting, all of them if `state` is None."""
        found = self._found("rewards", "? IS NULL OR state = ?", (state, state), "place")
        return [reward_row(row) for row in found]

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations that are not superseded, in order."""
        return [evaluation_row(row) for row in self._paged("evaluations", "state != 'superseded'")]

    def divergences(self, step: int) -> list[TurnDivergences]:
        """Return those of a step's hinted turns, empty if it has distilled none."""
        found = self._found("divergences", "step = ?", (step,), "place")
        return [divergences_row(row) for row in found]

    def poisoned(self) -> list[dict[str, Any]]:
        """Return the quarantined episodes, as in `poisoned.jsonl`."""
        return [object_row("poisoned", row) for row in self._paged("poisoned")]

    def _paged(self, table: str, tests: str = "TRUE", values: Values = ()) -> Iterator[Values]:
        """Yield rows by their first column, in pages, because bodies may exceed memory."""
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
    """Drop the last column, the checksum test; raise DamagedRecord if it failed."""
    *values, intact = row
    if not intact:
        raise damaged(table, values[0], "its checksum is that of another row")
    return tuple(values)
