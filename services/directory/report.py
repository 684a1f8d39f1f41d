"""Final report of a run: `summary.json`, a table and the reward curve.

Pure functions over the run's files; every figure comes from the metrics.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.services.directory.channel_activity import (
    activity_of,
    activity_text,
    failed_queries,
    named_totals,
)
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.file_checksums import FileChecksums

REPLAY_TOTALS = ("usd", "pairs", "states", "skipped", "answers", "cached", "expired", "saved_usd")
STORE_FILE = "run.sqlite"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SUMMARY_FILE = "summary.json"
ABOUT_EVALUATION_FILE = "evaluation.json"
"""Only an evaluation's directory has it."""
TIMELINE_FILE = "timeline.jsonl"
HINT_TEMPLATES_FILE = "hint_templates.json"

LONGEST_FILE = 1 << 30
"""Size in bytes of the largest file of lines that is read as a whole."""

Z_95 = 1.959963984540054

Share = Annotated[float, Field(ge=0, le=1)]
Episodes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Evaluation:
    """Held-out success of the policy after `step` optimizer steps, as a share of the episodes."""

    step: Annotated[int, Field(ge=0)]
    success: Share
    episodes: Episodes
    tasks: dict[str, tuple[Share, Episodes]] = field(default_factory=dict)
    """Success and episodes of each task, where there are several."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Temperature at which actions were sampled, 0 for greedy decoding; None if unknown."""

    @property
    def decoding(self) -> str:
        """How actions were chosen: "greedy" or "sampled at 0.7"; empty if unknown."""
        return _decoding(self.temperature)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the success."""
        return wilson_interval(self.success, self.episodes)


_EVALUATION = fail_fast(Evaluation)


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a share; (0, 1) without trials."""
    if trials <= 0:
        return 0.0, 1.0
    shrink = 1 + Z_95**2 / trials
    centre = share + Z_95**2 / (2 * trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    # Exact at the ends, where rounding would exclude 0 and 1.
    low = 0.0 if share <= 0 else (centre - half) / shrink
    return low, 1.0 if share >= 1 else (centre + half) / shrink


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the steps of a metrics file; an incomplete last line is skipped.

    Raises RunDirectoryError for a file that cannot be read, or a line that is no JSON object.
    """
    try:
        lines = read_regular(path, LONGEST_FILE).split(b"\n")
        return [_object(line) for line in lines[:-1] if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise unreadable_copy(path, error) from None


def unreadable_copy(path: Path, error: Exception) -> RunDirectoryError:
    """Return the error for a file of lines that cannot be read, and is a copy of rows."""
    return RunDirectoryError(
        f"{path} cannot be read ({short_reason(error)}): take it from a copy, or let train "
        "--resume make it again from run.sqlite"
    )


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read the evaluations of a run's file, as `read_metrics` does."""
    try:
        return [_EVALUATION.validate_python(one) for one in read_metrics(path)]
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} holds no evaluation ({short_reason(error)}): take it from a copy"
        ) from None


def _object(line: bytes) -> dict[str, Any]:
    value = parsed_json(line)
    if not isinstance(value, dict):
        raise ValueError("a line is not a JSON object")
    return value


def summarize(
    metrics: Sequence[Mapping[str, Any]],
    *,
    wall_s: float,
    configured: Collection[str],
    evaluations: Sequence[Evaluation] = (),
    restarts: int = 0,
    rest: Mapping[str, Any] | None = None,
    sessions: int = 1,
) -> dict[str, Any]:
    """Return the figures of `summary.json`; counts per step are summed.

    `wall_s` and `restarts` are those of all `sessions`, the starts of the run.

    The first evaluation is the initial one and the last of several the final one; a missing one is
    None. `configured` names the channels that are on, and `rest` holds the teachers' figures after
    the last step.
    """
    return {
        "steps": len(metrics),
        "wall_s": round(wall_s, 3),
        "sessions": sessions,
        "eval": {
            "initial": _evaluation(evaluations[0]) if evaluations else None,
            "final": _evaluation(evaluations[-1]) if len(evaluations) > 1 else None,
        },
        "channels": activity_of(metrics, configured, rest or {}),
        "replay": _replay([*metrics, rest or {}]),
        "restarts": restarts,
        **_hints(metrics),
        **_judges([*metrics, rest or {}]),
        "lag_max": max((step.get("lag/max") or 0 for step in metrics), default=0),
        "rollouts": _total(metrics, "rollouts/count"),
        "tokens_trained": _total(metrics, "tokens/trained"),
    }


def write_summary(
    run: Path,
    *,
    wall_s: float,
    configured: Collection[str],
    evaluations: Sequence[Evaluation] = (),
    restarts: int = 0,
    rest: Mapping[str, Any] | None = None,
    sessions: int = 1,
) -> dict[str, Any]:
    """Write the `summary.json` of a run directory atomically, and return it."""
    summary = summarize(
        read_metrics(run / METRICS_FILE),
        wall_s=wall_s,
        configured=configured,
        evaluations=evaluations,
        restarts=restarts,
        rest=rest,
        sessions=sessions,
    )
    with OpenFolder(run) as folder:
        content = json.dumps(summary, indent=2).encode() + b"\n"
        folder.write_whole(SUMMARY_FILE, content)
    checksums = FileChecksums(run)
    checksums.whole(SUMMARY_FILE, content)
    checksums.write()
    return summary


def summary_table(name: str, summary: Mapping[str, Any]) -> Table:
    """Return the summary as a printable table."""
    table = Table("", "", title=Text(f"run {name}"), box=SIMPLE_HEAD, show_header=False)
    table.columns[0].style = "cyan"
    for label, value in _rows(summary):
        table.add_row(label, Text(value))
    return table


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    steps, replay = summary["steps"], summary["replay"]
    return [
        ("steps", f"{steps:,} in {duration(summary['wall_s'])}{_in_sessions(summary)}"),
        ("held-out success before", _success(summary["eval"]["initial"])),
        ("held-out success after", _success(summary["eval"]["final"])),
        *(
            (f"{name} channel", activity_text(channel, steps))
            for name, channel in summary["channels"].items()
        ),
        ("replay", f"{replay['pairs']:,} pairs for ${replay['usd']:.2f}"),
        *_queries(replay, summary["channels"]["replay"]["active_steps"]),
        *([("hints", _shown_hints(summary["hints"]))] if "hints" in summary else []),
        *([("judges", _shown_judges(summary["judges"]))] if "judges" in summary else []),
        ("largest lag", f"{summary['lag_max']} versions"),
        ("trained on", f"{summary['tokens_trained']:,} tokens, {summary['rollouts']:,} rollouts"),
        ("restarts", str(summary["restarts"])),
    ]


def _in_sessions(summary: Mapping[str, Any]) -> str:
    return f", {summary['sessions']} sessions" if summary["sessions"] > 1 else ""


def _replay(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the totals of the teacher queries; `pairs` counts those that were trained on."""
    totals = {name: _total(metrics, f"replay/{name}") for name in REPLAY_TOTALS}
    named = {
        name: named_totals(metrics, f"replay/{prefix}/")
        for name, prefix in (
            *(("outcomes", "outcome"), ("failed", "failed"), ("failed_by", "failed_by")),
            ("dropped", "dropped"),
        )
    }
    return {**totals, **named}


def _queries(replay: Mapping[str, Any], active_steps: int) -> list[tuple[str, str]]:
    """Return the table rows that apply only if teachers were queried.

    Where the channel was never active, its own row states the failed queries.
    """
    if not replay.get("states"):
        return []
    dropped = ", ".join(f"{count:,} {name}" for name, count in replay["dropped"].items())
    failed = "; ".join(failed_queries(replay["failed_by"], replay["answers"]))
    rows = [
        (
            "queried about",
            f"{replay['states']:,} states, {replay['cached']:,} answers from the cache",
        ),
        (
            "gate",
            f"{replay['skipped']:,} states not queried, about ${replay['saved_usd']:.2f} saved",
        ),
        *([("failed queries", failed)] if failed and active_steps else []),
        ("filters dropped", dropped or "none"),
    ]
    if replay["expired"]:
        rows.append(("too late", f"{replay['expired']:,} pairs"))
    return rows


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    (low, high), tasks = evaluation.interval, evaluation.tasks
    return {
        "success": evaluation.success,
        "episodes": evaluation.episodes,
        **({} if evaluation.temperature is None else {"temperature": evaluation.temperature}),
        "interval_95": [round(low, 4), round(high, 4)],
        **({"tasks": {name: _task(*one) for name, one in sorted(tasks.items())}} if tasks else {}),
    }


def _task(success: float, episodes: int) -> dict[str, Any]:
    return _evaluation(Evaluation(0, success, episodes))


def _success(evaluation: Mapping[str, Any] | None) -> str:
    if evaluation is None:
        return "not measured"
    low, high = evaluation["interval_95"]
    decoding = _decoding(evaluation.get("temperature"))
    return (
        f"{evaluation['success']:.1%}  (95 % interval {low:.1%} to {high:.1%},"
        f" {evaluation['episodes']:,} episodes{', ' if decoding else ''}{decoding})"
    )


def _decoding(temperature: float | None) -> str:
    if temperature is None:
        return ""
    return f"sampled at {temperature:g}" if temperature else "greedy"


def duration(seconds: float) -> str:
    """Format seconds: `2.5 s`, `4 min 05 s`, `1 h 30 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _hints(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the outcome counts of all hints; empty if the SDPO channel was off."""
    keys = dict.fromkeys(key for step in metrics for key in step if key.startswith("hints/"))
    totals = {key.removeprefix("hints/"): _total(metrics, key) for key in keys}
    return {"hints": totals} if totals else {}


def _shown_hints(hints: Mapping[str, Any]) -> str:
    """Format `120 llm, 8 fallback, 3 refused; 120 requests for $0.12`, omitting zero counts."""
    counts = {name: n for name, n in hints.items() if n and name not in ("requests", "usd")}
    text = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items()) or "none"
    if not hints["requests"]:
        return text
    return f"{text}; {hints['requests']:,} requests for ${hints['usd']:.2f}"


def _judges(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what judges have cost in the run; empty if it has none."""
    reported = [step for step in metrics if "judge/usd_total" in step]
    if not reported:
        return {}
    usd, requests = reported[-1]["judge/usd_total"], reported[-1]["judge/requests"]
    left_out = _total(metrics, "judge/left_out")
    return {"judges": {"usd": usd, "requests": requests, "left_out": left_out}}


def _shown_judges(judges: Mapping[str, Any]) -> str:
    left_out = f"; {judges['left_out']:,} rollouts without" if judges["left_out"] else ""
    return f"{judges['requests']:,} requests for ${judges['usd']:.4f}{left_out}"


def _total(metrics: Sequence[Mapping[str, Any]], key: str) -> Any:
    return sum(step.get(key) or 0 for step in metrics)
