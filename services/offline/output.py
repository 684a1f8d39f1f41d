"""Output of an offline replay: its pairs and its report, in files and on the terminal.

    pairs.jsonl             one pair per line, replaced atomically, so it is never incomplete
    pairs.jsonl.replay/     job.json: the job's identity; report.json; the ledger; the answers

Files of another job, and files that were edited, are never replaced. The report is made of figures,
a plan and a ledger's sums. Its names and texts are untrusted: control codes are removed and markup
is not interpreted.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.rollouts.budget import BudgetReport, dollars
from composer_mesh.services.directory.claim import RunDirectoryError, claimed
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.offline.job import ReplayFigures, ReplayPlan
from composer_mesh.services.offline.options import ReplayRefused

FOLDER_SUFFIX = ".replay"
JOB_FILE, REPORT_FILE = "job.json", "report.json"
QUERY_FIELDS = {"name", "kind", "base_url", "model", "error_rate", "max_tokens", "temperature"}
RULES = {"ask", "agreement_threshold", "gate"}
Job = dict[str, Any]


@dataclass
class ReplayOutput:
    """Files of one job; created by `open`."""

    out: Path
    job: Job
    _written: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder of the ledger and the cached answers."""
        return folder_of(self.out)

    @classmethod
    @contextmanager
    def open(cls, out: Path, job: Job) -> Iterator["ReplayOutput"]:
        """Lock the output for a block; raise `ReplayRefused` if it belongs to another job.

        `job` holds everything that the pairs depend on, as plain JSON values.
        """
        job = json.loads(json.dumps(job))
        check_place(out, job)
        with _claimed(folder_of(out)):
            output = cls(out, job, check_place(out, job))
            output._remember()
            yield output

    def write_pairs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the pairs."""
        content = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
        # The hash is written first, so that after any interruption the file's hash is known.
        self._written = [*self._written[-1:], _digest(content)]
        self._remember()
        _replace(self.out, content)

    def write_report(self, report: Mapping[str, Any], other: Path | None = None) -> None:
        """Write the report next to the pairs, and also to `other`."""
        write_json(self.folder / REPORT_FILE, report)
        if other is not None:
            write_json(other, report)

    def _remember(self) -> None:
        write_json(self.folder / JOB_FILE, {"job": self.job, "written": self._written})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by one JSON object."""
    _replace(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def job_of(config: Config, traces: str) -> Job:
    """Return everything that determines the pairs. `traces` is the mark of the trace index.

    More traces or states, a higher spending limit, or other timeouts resume the same job.
    """
    replay = config.replay
    return {
        "traces": traces,
        "teachers": [
            teacher.model_dump(mode="json", include=QUERY_FIELDS) for teacher in replay.teachers
        ],
        "seed": config.run.seed,
        "rules": replay.model_dump(mode="json", include=RULES),
        "filters": [filter.model_dump(mode="json") for filter in replay.filters],
    }


def folder_of(out: Path) -> Path:
    """Return the folder of the job's state next to a file of pairs."""
    return out.with_name(out.name + FOLDER_SUFFIX)


def check_place(out: Path, job: Job) -> list[str]:
    """Return the hashes that this job may have written; raise `ReplayRefused` for other content.

    Changes nothing.
    """
    before = _before(folder_of(out) / JOB_FILE)
    if before is not None and (changed := _differences(before["job"], job)):
        raise ReplayRefused(
            f"--output {out} belongs to a replay with other {changed}: request the same, or name "
            "another file"
        )
    written: list[str] = before["written"] if before is not None else []
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ReplayRefused(f"--output {out} must be a file in a folder that is there: correct it")
    if out.exists() and _digest(out.read_bytes()) not in written:
        raise ReplayRefused(
            f"--output {out} holds something else than the last replay into it wrote, which would "
            "be lost: move it away, or name another file"
        )
    return written


def _before(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        before = json.loads(text)
        _ = dict(before["job"]), list(before["written"])
    except (ValueError, KeyError, TypeError):
        raise ReplayRefused(
            f"{path} is not what a replay wrote there: move {path.parent} away, or name another "
            "file with --out"
        ) from None
    return dict(before)


def _differences(before: Job, now: Job) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key])


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    try:
        with claimed(folder):
            yield
    except RunDirectoryError as error:
        raise ReplayRefused(
            f"{folder} cannot be had ({error}): wait for the other replay, or name another file "
            "with --out"
        ) from None


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically; it is on disk before it replaces an earlier one."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise ReplayRefused(
            f"{path} cannot be written ({error.strerror}): free the disk or name another place"
        ) from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


FINISHED, OUT_OF_BUDGET, STOPPED = "finished", "out_of_budget", "stopped"
SHOWN_STATES = 3
HOW_PRICED = (
    "at most: each question once, the longest answer. estimate: 4 bytes a prompt token, an answer "
    "as long as the student's action; a teacher that reasons writes far more. Repeated questions "
    "come on top, below the ceiling."
)


def replay_report(
    figures: ReplayFigures,
    plan: ReplayPlan,
    ledger: BudgetReport,
    ceiling: float,
    state: str,
    seconds: float,
) -> dict[str, Any]:
    """Return the figures as one object, for `report.json` and `--json`.

    The ledger's sums are over all repetitions of the replay; `ceiling` is in dollars. Savings are
    estimates: the number of queries avoided times the mean cost of such queries.
    """
    means = {
        name: dollars(account.spent) / account.requests
        for name, account in ledger.teachers.items()
        if account.requests
    }
    made = figures.outcomes["pair"]
    return {
        "state": state,
        "seconds": round(seconds, 3),
        "states": {
            "chosen": plan.states,
            "asked": figures.states,
            "answered": figures.answered,
            "skipped_by_gate": plan.skipped,
            "short_of_budget": len(figures.short_of_budget),
        },
        "outcomes": dict(figures.outcomes),
        "pairs": {"made": made, "kept": figures.kept, "dropped": dict(figures.dropped)},
        "teachers": {name: of.as_dict() for name, of in sorted(figures.teachers.items())},
        "usd": {
            "this_time": figures.usd,
            "spent": dollars(ledger.run.spent),
            "set_aside": dollars(ledger.run.reserved),
            "ceiling": ceiling,
            "saved_by_cache": _cost({n: of.cached for n, of in figures.teachers.items()}, means),
            "saved_by_gate": _saved_by_gate(plan, means),
        },
        "short_of_budget": figures.short_of_budget,
    }


def _cost(queries: Mapping[str, int], means: Mapping[str, float]) -> float:
    return sum(count * means.get(name, 0.0) for name, count in queries.items())


def _saved_by_gate(plan: ReplayPlan, means: Mapping[str, float]) -> float:
    """Return the cost of the queries that the gate avoided, at the mean of selected states."""
    chosen = _cost({name: of.questions for name, of in plan.teachers.items()}, means)
    return chosen / plan.states * plan.saved if plan.states else 0.0


def report_page(report: Mapping[str, Any]) -> RenderableType:
    """Render the report."""
    return Group(_summary(report), _teachers(report["teachers"]), *_examples(report["teachers"]))


def plan_page(plan: ReplayPlan, ceiling: float) -> RenderableType:
    """Render the price of a dry run."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text("what it would cost"))
    table.add_column("teacher")
    for title in ("questions", "estimate", "at most"):
        table.add_column(title, justify="right")
    for name, teacher in plan.teachers.items():
        bound, estimate = teacher.bound, teacher.estimate
        table.add_row(
            Text(plain_text(name)),
            f"{teacher.questions:,}",
            "unknown" if estimate is None else _usd(dollars(estimate)),
            "unknown" if bound is None else _usd(dollars(bound)),
        )
    table.add_section()
    total = (_usd(dollars(plan.estimate)), _usd(dollars(plan.bound)))
    table.add_row("all", f"{plan.questions:,}", *total)
    return Group(table, *map(Text, plan_lines(plan, ceiling)), Text(HOW_PRICED))


def plan_lines(plan: ReplayPlan, ceiling: float) -> list[str]:
    """Describe the planned queries and whether the spending limit covers them."""
    most, about = dollars(plan.bound), dollars(plan.estimate)
    lines = [
        f"{plan.states:,} states of {plan.groups:,} groups, {plan.skipped:,} skipped by the gate: "
        f"{plan.questions:,} questions, about {_usd(about)}, at most {_usd(most)}; "
        f"ceiling {_usd(ceiling)}"
    ]
    if plan.unknown:
        names = ", ".join(map(plain_text, plan.unknown))
        lines.append(f"the prices of {names} are unknown, so they are not in these sums")
    if most > ceiling:
        lines.append("the ceiling is below the most it can cost: it may end before all is queried")
    return lines


def _summary(report: Mapping[str, Any]) -> Table:
    table = Table("", "", box=SIMPLE_HEAD, show_header=False, title=Text("offline replay"))
    table.columns[0].style = "cyan"
    for label, value in _rows(report):
        table.add_row(label, Text(plain_text(value)))
    return table


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    states, pairs, usd = report["states"], report["pairs"], report["usd"]
    rows = [
        ("state", f"{report['state'].replace('_', ' ')} after {report['seconds']:.1f} s"),
        (
            "states",
            f"{states['asked']:,} of {states['chosen']:,} queried about, {states['answered']:,} "
            f"answered, {states['skipped_by_gate']:,} skipped by the gate",
        ),
        ("outcomes", _counts(report["outcomes"])),
        ("pairs", f"{pairs['kept']:,} kept of {pairs['made']:,}"),
        ("dropped by", _counts(pairs["dropped"])),
        (
            "dollars",
            f"{_usd(usd['this_time'])} this time, {_usd(usd['spent'])} in all of "
            f"{_usd(usd['ceiling'])}",
        ),
        (
            "saved, about",
            f"{_usd(usd['saved_by_cache'])} by the cache, {_usd(usd['saved_by_gate'])} by the gate",
        ),
    ]
    if short := report["short_of_budget"]:
        names = ", ".join(short[:SHOWN_STATES]) + (", …" if len(short) > SHOWN_STATES else "")
        rows.append(("short of budget", f"{len(short):,} states: {names}"))
    return rows


def _teachers(teachers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("teacher", no_wrap=True, overflow="ellipsis", min_width=10, max_width=40)
    titles = ("answered", "cached", "failed", "majority", "student", "usd", "p50 s", "p95 s")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for name, of in teachers.items():
        table.add_row(
            Text(plain_text(name)),
            *(f"{of[key]:,}" for key in ("answered", "cached")),
            f"{sum(of['failures'].values()):,}",
            *(_share(of[key]) for key in ("agrees_with_majority", "agrees_with_student")),
            _usd(of["usd"]),
            *(_seconds(of[key]) for key in ("latency_p50_s", "latency_p95_s")),
        )
    table.caption = Text("majority, student: how often it did the same as they did")
    return table


def _examples(teachers: Mapping[str, Mapping[str, Any]]) -> list[Text]:
    """Return one line for each teacher that failed: counts by kind, and the first reason."""
    return [
        Text(
            f"{plain_text(name)} failed: {_counts(of['failures'])}; "
            f"first: {plain_text(of['failure_example'])}"
        )
        for name, of in teachers.items()
        if of["failures"]
    ]


def _counts(counts: Mapping[str, int]) -> str:
    """Format nonzero counts: `84 pair, 12 tie`."""
    parts = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return ", ".join(parts) or "none"


def _usd(amount: float) -> str:
    return f"${amount:,.4f}" if 0 < amount < 1 else f"${amount:,.2f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
