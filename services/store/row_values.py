"""Checked values of the store's rows: SQLite stores values of any type in any column.

A checksum says that a row is as it was written, not that this program wrote it.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.directory.report import STORE_FILE, Evaluation
from composer_mesh.services.store.rows import (
    DamagedRecord,
    GroupRow,
    LateReward,
    PairRow,
    StepRow,
    TeacherQueryRow,
    TraceRow,
)
from composer_mesh.services.store.schema import COLUMNS

REPAIR = "train --resume moves it to quarantine/, or says what cannot continue without it"
Row = TypeVar("Row")
Values = tuple[Any, ...]

_GROUP, _TRACE, _PAIR = fail_fast(GroupRow), fail_fast(TraceRow), fail_fast(PairRow)
_REWARD, _STEP, _QUERY = fail_fast(LateReward), fail_fast(StepRow), fail_fast(TeacherQueryRow)
_EVALUATION, _OBJECT = fail_fast(Evaluation), fail_fast(dict[str, Any])


def damaged(table: str, row: object, why: str) -> DamagedRecord:
    """Return the error for a row that cannot be used."""
    return DamagedRecord(f"{STORE_FILE}, table {table}, row {row}", why, REPAIR)


def group_row(row: Values) -> GroupRow:
    return _checked(_GROUP, "groups", row[0], _named("groups", row))


def trace_row(row: Values) -> TraceRow:
    values = dict(zip(TraceRow.__slots__, row, strict=True))
    values["error_kinds"] = _json("traces", row[0], values["error_kinds"])
    return _checked(_TRACE, "traces", row[0], values)


def pair_row(row: Values) -> PairRow:
    return _checked(_PAIR, "pairs", row[0], _named("pairs", row))


def stored_pair(row: PairRow) -> PreferencePair:
    """Return the pair in a row; raise DamagedRecord if it holds none."""
    try:
        return pair_from_json(row.body)
    except ValueError as error:
        raise damaged("pairs", row.pair_id, short_reason(error)) from None


def reward_row(row: Values) -> LateReward:
    return _checked(_REWARD, "rewards", row[0], _named("rewards", row))


def step_row(row: Values) -> StepRow:
    values = _named("steps", row)
    line = values["metrics"]
    values["metrics"] = None if line is None else _json("steps", row[0], line)
    return _checked(_STEP, "steps", row[0], values | {"manifest": values["recipe"]})


def teacher_query_row(row: Values, pairs: tuple[str, ...]) -> TeacherQueryRow:
    return _checked(_QUERY, "asked", row[0], _named("asked", row) | {"pairs": pairs})


def evaluation_row(row: Values) -> Evaluation:
    return _checked(_EVALUATION, "evaluations", row[0], _json("evaluations", row[0], row[3]))


def half_precision(values: Sequence[float]) -> bytes:
    """Return numbers in 16 bits each, little-endian; larger ones as the largest."""
    largest = float(np.finfo(np.float16).max)
    found = np.nan_to_num(np.asarray(values, np.float32), nan=np.nan, posinf=largest)
    return bytes(np.clip(found, -largest, largest).astype("<f2").tobytes())


def divergences_row(row: Values) -> TurnDivergences:
    place, _, trace_id, turn, body = row
    try:
        return TurnDivergences(trace_id, turn, array("f", np.frombuffer(body, "<f2").tolist()))
    except (ValueError, TypeError) as error:
        raise damaged("divergences", place, short_reason(error)) from None


def object_row(table: str, row: Values) -> dict[str, Any]:
    """Return the JSON object in the last column."""
    return _checked(_OBJECT, table, row[0], _json(table, row[0], row[-1]))


def _named(table: str, row: Values) -> dict[str, Any]:
    return dict(zip(COLUMNS[table].split(", "), row, strict=True))


def _json(table: str, place: object, text: Any) -> Any:
    try:
        return parsed_json(text)
    except (ValueError, TypeError) as error:
        raise damaged(table, place, f"it holds no JSON: {short_reason(error)}") from None


def _checked(adapter: TypeAdapter[Row], table: str, place: object, values: Any) -> Row:
    if not isinstance(values, Mapping):
        raise damaged(table, place, "it holds no JSON object")
    try:
        return adapter.validate_python(values)
    except ValueError as error:
        raise damaged(table, place, short_reason(error)) from None
