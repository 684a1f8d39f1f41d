"""SQL of the rollout index: its columns and the tests of a `Where`."""

from composer_mesh.services.store.rows import Where
from composer_mesh.services.store.schema import whole

COLUMNS = {
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
SORTED = COLUMNS | {"error_sites": "json_array_length(error_kinds)"}

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
        f"SELECT {', '.join(COLUMNS.values())}, {whole('traces')} "
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
    asked = {name: value for name in TESTS if (value := getattr(where, name)) is not None}
    return " AND ".join(TESTS[name] for name in asked) or "TRUE", tuple(asked.values())
