"""Collects the verdict on a finished run: its audit, its faults' outcomes, and its own reports."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_audit import Audit, audit
from chaos_inject import Applied
from chaos_logprobs import Checked, check_versions, policies
from chaos_outcomes import Outcome, outcomes, unprovoked
from chaos_run import LiveRun
from chaos_schedule import Planned
from taken_groups import TakenGroups, taken_groups

from composer_mesh.configs.load import load_config
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import StoreMissing


@dataclass(frozen=True)
class Ended:
    """A finished run: ended by itself, or killed because it stalled for too long."""

    run: LiveRun
    applied: Sequence[Applied]
    missed: Sequence[Planned]
    """Faults that found no target."""
    status: int
    hangs: int
    left: Sequence[int]
    """Processes that outlived the command."""


@dataclass(frozen=True)
class Verdict:
    """All results by which a run is judged."""

    ended: Ended
    audit: Audit
    checked: Checked
    outcomes: Sequence[Outcome]
    unprovoked: Sequence[Mapping[str, Any]]
    """Deaths that no fault explains."""
    success: float | None
    """Final held-out success; None where the run did not get there."""
    events: Counter[str]
    retried: int
    """Rollouts that were retried."""
    restarts: int
    wall_s: float
    rewritten: Sequence[str]


def judge(ended: Ended) -> Verdict:
    """Judge a run from its directory. Waits for the log-probs of its tokens to be recomputed."""
    run = ended.run
    config = load_config(run.root / "config.toml", [])
    traces, taken = stored(run.root)
    poisoned = read_lines(run.root / "poisoned.jsonl")
    folders = policies(run.policies, _initial(run.events))
    summary = _summary(run.root)
    final = (summary.get("eval") or {}).get("final")
    return Verdict(
        ended,
        audit(traces, run.metrics, taken, run.first_seen, poisoned, config.schedule),
        check_versions(
            [trace for trace in traces if trace.split == "train"],
            folders,
            config.generator.temperature,
        ),
        outcomes(ended.applied, run.events),
        unprovoked(ended.applied, run.events),
        final["success"] if final and ended.status == 0 else None,
        Counter(event["event"] for event in run.events),
        int(sum(line.get("rollouts/retried") or 0 for line in run.metrics)),
        int(summary.get("restarts") or 0),
        float(summary.get("wall_s") or 0.0),
        run.rewritten,
    )


def write_outcomes(verdict: Verdict, path: Path) -> None:
    """Write every fault and its outcome, one per line."""
    lines = [
        json.dumps(dataclasses.asdict(one.applied) | {"fate": one.fate, **_seconds(one)})
        for one in verdict.outcomes
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def _seconds(one: Outcome) -> dict[str, float | None]:
    return {"detected_s": one.detected_s, "recovered_s": one.recovered_s}


def stored(root: Path) -> tuple[list[Trace], list[TakenGroups]]:
    """Return a run's rollouts and the groups of its steps; none where it did not come so far."""
    try:
        with RunReader(root) as reader:
            return list(reader.all_traces()), taken_groups(reader)
    except StoreMissing:
        return [], []


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _initial(events: Sequence[Mapping[str, Any]]) -> Path | None:
    """Return the folder of version 0, as named by the run."""
    ready = [event["detail"] for event in events if event["event"] == "policy_ready"]
    return Path(ready[0]) if ready else None


def _summary(root: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((root / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return summary
