"""Parquet files of rollouts and pairs with a fixed schema, which empty files have too.

Needs pyarrow: `pip install 'composer-mesh[export]'`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from composer_mesh.rollouts.pairs import PreferencePair, pair_record
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.traces.listing import Both, Listed

ROWS_TOGETHER = 256
"""Rows per row group; readers can skip row groups that they do not need."""

_TEXT, _INT, _REAL = pa.string(), pa.int64(), pa.float64()
_TURN = pa.struct(
    [
        ("context_ids", pa.list_(pa.int32())),
        ("action_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(_REAL)),
        ("versions", pa.list_(pa.int32())),
        ("stop_reason", _TEXT),
        ("trained", pa.bool_()),
    ]
)
_SITE = pa.struct(
    [("turn", _INT), ("error_kind", _TEXT), ("hint_template_key", _TEXT), ("data", _TEXT)]
)
TRACES = pa.schema(
    [
        *(("trace_id", _TEXT), ("group_id", _INT), ("sample", _INT), ("task", _TEXT)),
        *(("split", _TEXT), ("index", _INT), ("state", _TEXT), ("step", _INT)),
        *(("reward", _REAL), ("late_reward", _REAL), ("success", pa.bool_())),
        *(("messages", _TEXT), ("turns", pa.list_(_TURN)), ("error_sites", pa.list_(_SITE))),
        *(("rewards", _TEXT), ("answer", _TEXT), ("role", _TEXT), ("advantage", _REAL)),
        ("screened", pa.bool_()),
        *(("turn_rewards", pa.list_(_REAL)), ("turn_advantages", pa.list_(_REAL))),
    ]
)
_SAID = pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))
PAIRS = pa.schema(
    [
        *(("prompt", _SAID), ("chosen", _SAID), ("rejected", _SAID)),
        *(("state_id", _TEXT), ("trace_id", _TEXT), ("turn", _INT)),
        *(("chosen_text", _TEXT), ("rejected_text", _TEXT), ("state_messages", _TEXT)),
        *(("chosen_message", _TEXT), ("rejected_message", _TEXT)),
        *(("n_teachers_agreeing", _INT), ("teachers", pa.list_(_TEXT)), ("votes", _INT)),
        *(("asked", _INT), ("usd", _REAL), ("usd_known", pa.bool_())),
        *(("policy_version", _INT), ("provenance", _TEXT)),
    ]
)


class Parquet:
    """A Parquet file of rollouts, or of pairs if its name contains "pairs"."""

    def __init__(self, path: Path) -> None:
        self._schema = PAIRS if "pairs" in path.name else TRACES
        self._writer = ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def traces(self, rollouts: Sequence[Both]) -> None:
        self._add([_row(one, part) for one, trace in rollouts for part in trace.trajectories()])

    def pairs(self, pairs: Sequence[PreferencePair]) -> None:
        self._add([pair_record(pair) for pair in pairs])

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _add(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        if len(self._rows) >= ROWS_TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
            self._rows = []


def _row(one: Listed, trace: Trace) -> dict[str, Any]:
    """Convert a trajectory of a rollout to a row; messages, rewards and error data are JSON."""
    late = one.late.reward if one.late else None
    return {
        "trace_id": trace.trace_id,
        "group_id": trace.group_id,
        "sample": trace.sample,
        "task": trace.task,
        "split": trace.split,
        "index": trace.index,
        "state": str(one.row.state),
        "step": one.step,
        "reward": trace.reward,
        "late_reward": late,
        "success": trace.success,
        "messages": json.dumps(trace.messages, ensure_ascii=False),
        "turns": [
            {
                "context_ids": turn.context_ids,
                "action_ids": turn.action_ids,
                "logprobs": turn.logprobs,
                "versions": turn.versions,
                "stop_reason": turn.stop_reason,
                "trained": turn.trained,
            }
            for turn in trace.turns
        ],
        "error_sites": [
            {
                "turn": site.turn,
                "error_kind": site.error_kind,
                "hint_template_key": site.hint_template_key,
                "data": json.dumps(site.data, ensure_ascii=False),
            }
            for site in trace.error_sites
        ],
        "rewards": json.dumps(trace.rewards),
        "answer": trace.answer,
        "role": trace.role,
        "advantage": trace.advantage,
        "screened": trace.screened,
        "turn_rewards": trace.turn_rewards,
        "turn_advantages": trace.turn_advantages,
    }
