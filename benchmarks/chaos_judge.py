"""The verdict on finished runs: audits, outcomes of faults, and the tables and ratios of claims."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_audit import Audit, audit
from chaos_inject import Ended
from chaos_logprobs import Checked, check_versions, policies
from chaos_outcomes import Fate, Outcome, Summary, outcomes, percentile, unprovoked
from chaos_schedule import Fault
from report import Report
from taken_groups import TakenGroups, taken_groups

from composer_mesh.configs.load import load_config
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import StoreMissing

LARGEST_DELTA = 0.03
MOST_MISSED = 0.1
"""The share of faults that may find no target."""
COLUMNS = ("faults", "detected s", "recovered s", *(fate.value for fate in Fate))


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


def print_tables(report: Report, peace: Verdict, chaos: Verdict) -> None:
    """Print faults by kind, by actor and by moment; then both runs."""
    struck = len(chaos.outcomes)
    sorts: list[tuple[str, Callable[[Outcome], str], Sequence[str]]] = [
        ("fault", lambda one: one.applied.planned.fault.value, [fault.value for fault in Fault]),
        ("actor", lambda one: one.applied.planned.kind, _kinds(chaos.outcomes)),
        ("moment", _moment, ("alone", "in a burst", "during a weight sync")),
    ]
    for title, sort, names in sorts:
        groups = {name: [one for one in chaos.outcomes if sort(one) == name] for name in names}
        rows = [[name, *Summary.of(found).cells()] for name, found in groups.items() if found]
        rows.append(["all", *Summary.of(chaos.outcomes).cells()])
        report.print_table(f"{struck} faults; seconds p50 / p95", (title, *COLUMNS), rows)
    rows = [
        [name, _shown(of_peace), _shown(of_chaos)]
        for (name, of_peace), of_chaos in zip(
            _figures(peace).items(), _figures(chaos).values(), strict=True
        )
    ]
    report.print_table("two runs of one seed", ("figure", "in peace", "under faults"), rows)
    for one in chaos.outcomes:
        if one.fate in (Fate.LOST, Fate.GIVEN_UP):
            fault = one.applied
            print(f"{one.fate}: {fault.planned.fault} of {fault.actor} {fault.endpoint}".rstrip())
    if chaos.events["status_stopped"]:
        print("the status was not written for a while, in which faults found no processes")
    for event in chaos.unprovoked:
        print(f"no fault explains: {event['actor']}: {event['detail']}")
    for name, verdict in (("in peace", peace), ("under faults", chaos)):
        for violation in verdict.audit.violations:
            print(f"the run {name}: {violation}")
        if verdict.ended.status != 0:
            print(f"the run {name} ended with {verdict.ended.status}: {_last(verdict)}")


def fill_report(report: Report, peace: Verdict, chaos: Verdict) -> None:
    """Add the figures of both runs and of all faults, and the ratios of the claims."""
    for prefix, verdict in (("peace", peace), ("chaos", chaos)):
        report.figures |= {f"{prefix}_{name}": v for name, v in _figures(verdict).items()}
    summary = Summary.of(chaos.outcomes)
    report.figures["faults"] = summary.faults
    report.figures["faults_missed"] = len(chaos.ended.missed)
    for name, seconds in (("detected", summary.detected), ("recovered", summary.recovered)):
        if seconds:
            report.figures[f"{name}_p50_s"] = percentile(seconds, 0.5)
            report.figures[f"{name}_p95_s"] = percentile(seconds, 0.95)
    audit = chaos.audit
    report.ratios["traces_lost"] = audit.traces_lost + len(chaos.rewritten)
    report.ratios["traces_wrong"] = audit.duplicates + audit.broken + len(audit.violations)
    report.ratios["stale_tokens"] = chaos.checked.stale + audit.lag_breaks + audit.from_the_future
    report.ratios["hangs"] = chaos.ended.hangs
    report.ratios["not_healed"] = summary.fates[Fate.LOST] + summary.fates[Fate.GIVEN_UP]
    report.ratios["processes_left"] = len(chaos.ended.left)
    report.ratios["success_delta"] = _delta(peace, chaos)


def holds(report: Report) -> bool:
    """Whether every claim holds, and enough faults took effect to judge."""
    ratios, figures = dict(report.ratios), report.figures
    enough = float(figures["faults_missed"]) <= MOST_MISSED * float(figures["faults"])
    return enough and ratios.pop("success_delta") <= LARGEST_DELTA and not any(ratios.values())


def _delta(peace: Verdict, chaos: Verdict) -> float:
    """Return the difference of the two runs' final success; 1 where one did not finish."""
    if peace.success is None or chaos.success is None:
        return 1.0
    return abs(peace.success - chaos.success)


def _figures(verdict: Verdict) -> dict[str, float]:
    audit, checked, run = verdict.audit, verdict.checked, verdict.ended.run
    return {
        "status": verdict.ended.status,
        "steps": len(run.metrics),
        "wall_s": verdict.wall_s,
        "longest_wait_s": round(run.longest_wait_s(), 1),
        "final_success": -1.0 if verdict.success is None else verdict.success,
        "restarts": verdict.restarts,
        "unprovoked_deaths": len(verdict.unprovoked),
        "rollouts_retried": verdict.retried,
        "sdpo_steps_lost": verdict.events["sdpo_lost"],
        "traces_lost": audit.traces_lost,
        "traces_twice": audit.duplicates,
        "traces_broken": audit.broken,
        "samples_given_up": audit.given_up,
        "steps_wrong": len(audit.violations),
        "lag_breaks": audit.lag_breaks + audit.from_the_future,
        "stale_tokens": checked.stale,
        "tokens_checked": checked.tokens,
        "versions_checked": checked.versions,
        "traces_a_neighbour_denies": round(checked.power, 3),
        "worst_nats": round(checked.worst_nats, 6),
        "hangs": verdict.ended.hangs,
        "processes_left": len(verdict.ended.left),
    }


def _shown(value: float) -> str:
    return f"{value:,.6g}"


def _kinds(found: Sequence[Outcome]) -> list[str]:
    return sorted({one.applied.planned.kind for one in found})


def _moment(one: Outcome) -> str:
    planned = one.applied.planned
    if planned.endpoint is not None:
        return "during a weight sync"
    return "alone" if planned.burst is None else "in a burst"


def _last(verdict: Verdict) -> str:
    lines = verdict.ended.run.stderr.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
