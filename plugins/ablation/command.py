"""The `composer-mesh ablate` command: trains the planned runs and reports after each of them.

It also merges the finished runs of earlier `ablation.json` reports into an ablation: seeds may be
run on several machines, and settings added to an ablation whose runs are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.plugins.ablation.page import (
    DIFFICULTY_FILE,
    PAGE_FILE,
    PICTURE_FILE,
    draw_ablation,
    draw_difficulty,
    notes,
    report_table,
    write_page,
)
from composer_mesh.plugins.ablation.plan import Ablation, Study, Train, run_ablation
from composer_mesh.plugins.ablation.report import (
    FINISHED,
    LARGEST_REPORT,
    REPORT_FILE,
    Cost,
    RunOutcome,
    settings_of,
    study_report,
    unfinished,
    write_report,
)
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.directory.report import Evaluation

INCOMPLETE = 1


def ablate_command(
    study: Study,
    output: Path,
    train: Train,
    power: str = "",
    usd_per_hour: float | None = None,
    merged: Mapping[Path, RunOutcome] | None = None,
) -> int:
    """Return the exit status: 0, 1 if a run did not finish, 130 after Ctrl-C, 143 after SIGTERM."""
    console = Console()

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def publish() -> dict[str, Any]:
        """Write the report of all ended runs."""
        report = study_report(study, output, power, usd_per_hour, merged)
        write_report(report, output)
        return report

    if power:
        tell(power)
    code = run_ablation(study.runs, output, train, tell, publish, merged or ())
    report = publish()
    _draw(report, output)
    write_page(report, output)
    for setting in settings_of(report):
        console.print(report_table(setting))
        for line in notes(setting, usd_per_hour):
            tell(line)
    tell(f"everything: {output / REPORT_FILE}")
    tell(f"page: {output / PAGE_FILE}")
    if study.single:
        tell(f"curves: {output / PICTURE_FILE}")
    complete = not any(unfinished(report))
    return code or (0 if complete else INCOMPLETE)


def _draw(report: dict[str, Any], output: Path) -> None:
    """Draw the curves of each setting, and what they come to by difficulty."""
    for setting in settings_of(report):
        folder = output / setting["setting"]
        folder.mkdir(parents=True, exist_ok=True)
        draw_ablation(setting, folder / PICTURE_FILE)
    if report.get("difficulty") is not None:
        draw_difficulty(report, output / DIFFICULTY_FILE)


Merged = dict[Path, RunOutcome]
"""Outcomes of planned runs, by the directories that the runs would have."""


@dataclass(frozen=True)
class _Run:
    """What is read of a run in a report."""

    arm: str
    seed: int
    state: str
    evaluations: list[Evaluation]
    wall_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    cost: Cost | None = None


@dataclass(frozen=True)
class _Setting:
    """What is read of a setting in a report."""

    base: Config
    eval_every: int
    runs: list[_Run]

    def differences(self, plan: Ablation) -> list[str]:
        """Return what differs from a planned setting, but for arms, seeds and the run's name."""
        own, planned = (one.model_dump(mode="json") for one in (self.base, plan.base))
        del own["run"]["name"], planned["run"]["name"]
        found = [section for section in own if own[section] != planned[section]]
        return found + ["--eval-every"] * (self.eval_every != plan.eval_every)


_SETTING = fail_fast(_Setting)


def merged_runs(study: Study, reports: Sequence[Path]) -> Merged:
    """Return the finished runs of `ablation.json` files, or of their directories, that are planned.

    Raises `UsageError` for a file that is no report, that has no setting of the study, or that
    holds a run which another one holds too.
    """
    found: Merged = {}
    for path in reports:
        file = path / REPORT_FILE if path.is_dir() else path
        settings = _settings(file)
        pairs = [(plan, one, one.differences(plan)) for plan in study.settings for one in settings]
        matches = [(plan, one) for plan, one, different in pairs if not different]
        if not matches:
            least = min((different for *_, different in pairs), key=len, default=["no setting"])
            raise UsageError(
                f"--merge {path} has no setting of this ablation ({', '.join(least)} differ): give "
                "the options that it was made with, or leave it out"
            )
        for plan, setting in matches:
            for outcome in _outcomes(plan, setting, path):
                if outcome.run.place in found:
                    raise UsageError(
                        f"--merge {path} holds {outcome.run}, which an earlier one holds too: "
                        "leave one of the two out"
                    )
                found[outcome.run.place] = outcome
    return found


def _settings(file: Path) -> list[_Setting]:
    try:
        report = parsed_json(read_regular(file, LARGEST_REPORT))
        return [_SETTING.validate_python(one) for one in settings_of(report)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"--merge {file} is not a report of an ablation ({short_reason(error)}): name the "
            f"{REPORT_FILE} of one, or its directory"
        ) from None


def _outcomes(plan: Ablation, setting: _Setting, report: Path) -> Iterator[RunOutcome]:
    """Yield the finished ones of a setting's runs that are planned; raise `UsageError`."""
    planned = {(run.arm, run.seed): run for run in plan.runs}
    for one in setting.runs:
        run = planned.get((one.arm, one.seed))
        if run is None or one.state != FINISHED:
            continue
        if not one.evaluations or one.evaluations[-1].step != run.config.run.steps:
            raise UsageError(
                f"--merge {report} says that {run} finished, but its last evaluation is not after "
                f"step {run.config.run.steps}: take the report from a copy"
            )
        yield RunOutcome(run, FINISHED, "", one.wall_s, one.evaluations, one.cost)
