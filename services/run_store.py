"""The files of a run directory: traces, pairs, metrics, evaluations and events, as they are made.

Append-only JSON lines, one object each, on disk when a call returns. Reading them back for a
resume is not here yet; what a file means is its writer's business.
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair, pair_to_json
from composer_mesh.rollouts.poison import PoisonedInput
from composer_mesh.rollouts.traces import Trace, trace_to_json
from composer_mesh.services.report import EVALUATIONS_FILE, METRICS_FILE, Evaluation

POISONED_FILE = "poisoned.jsonl"


class RunStore:
    """One run's directory, as a context manager. Not shared between processes."""

    def __init__(self, root: Path, config: Config) -> None:
        self.root = root
        for folder in ("traces", "pairs", "checkpoints"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "config.toml").write_text(dump_toml(config))
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def add_traces(self, traces: Sequence[Trace]) -> None:
        self._append("traces/traces.jsonl", map(trace_to_json, traces))

    def add_pairs(self, pairs: Sequence[PreferencePair]) -> None:
        self._append("pairs/pairs.jsonl", map(pair_to_json, pairs))

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        self._append(METRICS_FILE, [_json(metrics)])

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """One held-out evaluation, of the policy after so many steps."""
        self._append(EVALUATIONS_FILE, [_json(dataclasses.asdict(evaluation))])

    def add_poisoned(self, poisoned: PoisonedInput) -> None:
        """One episode that was set aside because it failed again and again in the same way."""
        self._append(POISONED_FILE, [_json(dataclasses.asdict(poisoned))])

    def add_event(
        self,
        kind: str,
        actor: str = "",
        detail: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """One lifecycle or supervision event, with the wall clock in seconds since 1970.

        `fields` are what programs read of it: kind, host, rank, cause, class, generation.
        """
        event: dict[str, Any] = {"time": round(time.time(), 3), "event": kind}
        event |= {"actor": actor, "detail": detail}
        if fields:
            event["fields"] = dict(fields)
        self._append("events.jsonl", [_json(event)])

    def _append(self, name: str, lines: Iterable[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        if not data:
            return
        if name not in self._files:
            self._files[name] = (self.root / name).open("ab")
        file = self._files[name]
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
