"""The report of an offline replay: sums of the replies, and others' words as words.

Its files: traces are found and checked first, pairs never replace another's.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offline_runs import (
    BUILTIN,
    play,
    replay_section,
    traces_of,
    write_older_run,
    write_run,
    write_traces,
)
from preferences import ADD, ANSWER, BROKEN, LOOK, answer, answers, failure, student
from rich.console import Console

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.rollouts.budget import NANO, Account, BudgetReport, Prices
from composer_mesh.rollouts.pairs import FailureKind
from composer_mesh.rollouts.state_choice import Selection
from composer_mesh.rollouts.traces import trace_to_json
from composer_mesh.services.offline.command import ReplayView
from composer_mesh.services.offline.job import (
    ReplayFigures,
    ReplayPlan,
    percentile,
    plan_replay,
    share_of,
)
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.offline.output import (
    FINISHED,
    ReplayOutput,
    check_place,
    folder_of,
    job_of,
    plan_lines,
    plan_page,
    replay_report,
    report_page,
)
from composer_mesh.services.offline.traces import TraceFileError, index_traces
from composer_mesh.services.store.group_files import path_of
from composer_mesh.tasks.toolbox import ToolboxTask

PRICES = Prices.per_million(1, 10)


def teacher(name: str, prices: Prices | None = PRICES) -> TeacherEndpoint:
    return TeacherEndpoint(name, "https://t.test/v1", name, max_tokens=100, prices=prices)


def plan(*teachers: TeacherEndpoint, skipped: int = 3, saved: int = 2, **replay: Any) -> ReplayPlan:
    states = [student(ANSWER) for _ in range(4)]
    chosen = Selection(states, [0.5] * 4, skipped, 4 + skipped, saved)
    config = ReplayConfig(**{"ask": 2, **replay})
    return plan_replay([chosen], teachers or (teacher("a"), teacher("b")), [], config)


def money(spent: float = 0.0, requests: int = 0) -> BudgetReport:
    account = Account(spent=round(spent * NANO), requests=requests)
    return BudgetReport(account, {"a": account})


def counted(*states: Any) -> ReplayFigures:
    figures = ReplayFigures(2)
    for replies in states:
        figures.add([student(ANSWER)], replies)
    return figures


def printed(page: Any) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(page)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_each_teacher_is_counted_by_what_became_of_its_question() -> None:
    cached = answer("a", ADD, 0.0, cached=True)
    figures = counted(
        answers(ADD, ADD, ADD),
        [cached, answer("b", LOOK), failure("c", usd=0.25)],
        [answer("a", ANSWER), answer("b", ANSWER), answer("c", BROKEN)],
    )
    shown = {name: of.as_dict() for name, of in figures.teachers.items()}
    assert [(of["asked"], of["answered"], of["cached"]) for of in shown.values()] == [
        (3, 3, 1), (3, 3, 0), (3, 2, 0),
    ]  # fmt: skip
    assert shown["c"]["failures"] == {"rate": 1}
    assert shown["c"]["malformed"] == 1
    assert shown["c"]["usd"] == 0.5 + 0.25 + 0.5
    assert figures.outcomes["pair"] == figures.outcomes["student_agrees"] == 1


def test_agreement_counts_votes_where_there_was_a_majority() -> None:
    figures = counted(answers(ADD, ADD, LOOK), answers(ADD, ADD, ADD), answers(ADD, LOOK, None))
    assert figures.teachers["a"].majority == [True, True]
    assert share_of(figures.teachers["c"].majority) == 0.5


def test_a_state_that_lacks_a_teacher_for_the_budget_is_named() -> None:
    figures = counted(answers(ADD, ADD), [answer("a", ADD), failure("b", FailureKind.BUDGET)])
    assert figures.short_of_budget == ["g0-s0/1"]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0)],
)
def test_a_percentile_is_a_value_that_was_measured(
    values: list[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


def test_ninety_five_of_a_hundred_are_not_above_the_95th() -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], 0.95) == 95.0


def test_the_plan_counts_each_question_and_bounds_it_by_the_longest_answer() -> None:
    priced = plan()
    assert (priced.states, priced.skipped, priced.questions) == (4, 3, 8)
    longest = 8 * 100 * 10 * NANO // 10**6
    assert longest < priced.bound < 2 * longest
    assert 0 < priced.estimate < longest


def test_teachers_take_turns_where_fewer_are_asked_than_there_are() -> None:
    three = plan(teacher("a"), teacher("b"), teacher("c"))
    assert three.questions == 8


def test_an_unknown_price_is_named_and_counts_as_what_the_config_assumes() -> None:
    refused = plan(teacher("a"), teacher("b", None))
    assert (refused.unknown, refused.teachers["b"].bound) == (["b"], None)
    assert any("the prices of b are unknown" in line for line in plan_lines(refused, 1.0))
    allowed = plan(
        teacher("a"),
        teacher("b", None),
        budget={"unknown_prices": "allow", "assumed_usd": 0.5},
    )
    assert allowed.teachers["b"].bound == 4 * 0.5 * NANO


def test_a_ceiling_below_the_bound_is_said_before_anything_is_asked() -> None:
    assert any("it may end before all is queried" in line for line in plan_lines(plan(), 0.0001))
    assert len(plan_lines(plan(), 1.0)) == 1


def test_what_was_saved_is_what_such_questions_have_cost() -> None:
    figures = counted([answer("a", ADD, 0.0, cached=True), failure("b")])
    report = replay_report(figures, plan(), money(spent=0.8, requests=8), 1.0, FINISHED, 1.0)
    assert report["usd"]["saved_by_cache"] == pytest.approx(0.1)
    # Four questions to teacher a for four states: a skipped state would have cost one.
    assert report["usd"]["saved_by_gate"] == pytest.approx(2 * 0.1)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_names_and_failures_reach_the_terminal_as_words() -> None:
    name, text = "[red]evil\x1b[2J", "no\x1b]0;title\x07 [bold]way[/bold]"
    figures = counted([replace(failure(name), text=text), failure("b")])
    report = replay_report(figures, plan(), money(), 1.0, FINISHED, 1.0)
    shown = printed(report_page(report)) + printed(plan_page(plan(teacher(name)), 1.0))
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "[red]evil" in shown
    assert "[bold]way[/bold]" in shown


def test_without_a_terminal_progress_is_a_few_plain_lines() -> None:
    out = io.StringIO()
    figures = ReplayFigures(2)
    with ReplayView(plan(), 1.0, Console(file=out, width=60)) as view:
        for _ in range(4):
            figures.add([student(ANSWER)], answers(ADD, ADD))
            view.tell(figures)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("4 states of 1 groups")
    assert [line.split()[1] for line in lines[1:]] == [f"states={n}/4" for n in (1, 2, 3, 4)]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_progress_is_a_bar_that_lines_go_above() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, legacy_windows=False)
    with ReplayView(plan(), 1.0, console) as view:
        figures = counted(answers(ADD, ADD))
        view.tell(figures)
        view.say("a line")
    assert "1/4" in out.getvalue()
    assert "a line" in out.getvalue()


@pytest.fixture
def run(tmp_path: Path, build_config, toolbox: ToolboxTask) -> Path:
    config = build_config(replay=replay_section(BUILTIN))
    return write_older_run(tmp_path / "run", config, traces_of(toolbox, 3))


@pytest.fixture
def stored(tmp_path: Path, build_config, toolbox: ToolboxTask) -> Path:
    config = build_config(replay=replay_section(BUILTIN))
    return write_run(tmp_path / "stored", config, traces_of(toolbox, 3))


@pytest.mark.parametrize("place", [".", "traces"])
def test_a_store_has_the_same_groups_and_mark_as_a_file_of_its_traces(
    run: Path, stored: Path, place: str
) -> None:
    index, older = index_traces(stored / place), index_traces(run)
    assert index.run == stored
    assert (len(index), index.traces, index.task) == (3, 9, "toolbox")
    assert list(index.groups()) == list(older.groups())
    assert index.mark == older.mark


def test_a_damaged_group_of_a_store_is_refused_before_anybody_is_asked(stored: Path) -> None:
    path = path_of(stored, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceFileError, match=r"000001\.safetensors is damaged"):
        index_traces(stored)


@pytest.mark.parametrize("place", [".", "traces", "traces/traces.jsonl"])
def test_a_run_its_folder_and_its_file_are_the_same_traces(run: Path, place: str) -> None:
    index = index_traces(run / place)
    assert index.run == run
    assert (len(index), index.traces, index.task) == (3, 9, "toolbox")


def test_a_file_elsewhere_belongs_to_no_run(tmp_path: Path, toolbox: ToolboxTask) -> None:
    assert index_traces(write_traces(tmp_path / "mine.jsonl", traces_of(toolbox, 1))).run is None


def test_groups_come_whole_and_by_their_ids_however_the_file_mixes_them(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 3)
    index = index_traces(write_traces(tmp_path / "t.jsonl", traces[::-1]))
    groups = list(index.groups())
    assert [[trace.group_id for trace in group] for group in groups] == [[0] * 3, [1] * 3, [2] * 3]
    assert {trace.trace_id: trace for group in groups for trace in group} == {
        trace.trace_id: trace for trace in traces
    }


def test_groups_may_be_spread_over_files(tmp_path: Path, toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox, 2)
    for place in (0, 1):
        write_traces(tmp_path / f"part-{place}.jsonl", traces[place::2])
    assert [len(group) for group in index_traces(tmp_path).groups()] == [3, 3]


def test_held_out_traces_are_not_replayed(tmp_path: Path, toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox, 1)
    held = replace(traces[0], trace_id="heldout-000000-000", split="heldout")
    assert index_traces(write_traces(tmp_path / "t.jsonl", [*traces, held])).traces == 3


def test_a_corrupt_line_is_named_with_its_number(run: Path) -> None:
    path = run / "traces" / "traces.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b'{"trace_id": "x"}\n', *lines[4:]]))
    with pytest.raises(
        TraceFileError, match=r"traces\.jsonl line 5 is not a trace .*: repair or rem"
    ):
        index_traces(run)


def test_what_a_corrupt_line_holds_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"secret": "sk-in-the-line"}\n')
    with pytest.raises(TraceFileError) as caught:
        index_traces(path)
    assert "sk-in-the-line" not in str(caught.value)


def test_a_last_line_that_is_still_written_is_left_out_and_counted(run: Path) -> None:
    path = run / "traces" / "traces.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    index = index_traces(run)
    assert (index.traces, index.cut) == (8, 1)


def test_a_trace_that_is_there_twice_is_refused_with_both_places(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 1)
    path = write_traces(tmp_path / "t.jsonl", [*traces, traces[0]])
    with pytest.raises(TraceFileError, match=r"line 1 and in .* line 4"):
        index_traces(path)


def test_a_folder_of_other_files_is_no_folder_of_traces(run: Path) -> None:
    (run / "traces" / "traces.jsonl").unlink()
    (run / "traces").rmdir()
    with pytest.raises(TraceFileError, match="holds no traces"):
        index_traces(run)


@pytest.mark.parametrize("name", ["missing", "missing.jsonl"])
def test_traces_that_do_not_exist_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFileError, match="does not exist: name a run directory"):
        index_traces(tmp_path / name)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="holds no training trace"):
        index_traces(write_traces(tmp_path / "t.jsonl", []))


def test_the_mark_stays_while_traces_are_added_and_differs_between_runs(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 2)
    first = index_traces(write_traces(tmp_path / "a.jsonl", traces[:3])).mark
    grown = index_traces(write_traces(tmp_path / "b.jsonl", traces)).mark
    other = index_traces(write_traces(tmp_path / "c.jsonl", [play(toolbox, 0, 7)])).mark
    assert first == grown != other


def test_a_file_that_changes_during_the_replay_is_noticed(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    path = write_traces(tmp_path / "t.jsonl", traces_of(toolbox, 2))
    index = index_traces(path)
    path.write_bytes(b"x" + trace_to_json(play(toolbox, 0, 0)) + b"\n")
    with pytest.raises(TraceFileError, match="no longer the trace that it was"):
        list(index.groups())


JOB = {"traces": "mark", "teachers": [{"name": "a"}], "rules": {"ask": 3}}


def write(out: Path, *rows: dict, job: dict = JOB) -> None:
    with ReplayOutput.open(out, job) as output:
        output.write_pairs(rows)


def test_the_same_job_replaces_its_own_pairs(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    write(out, {"n": 1}, {"n": 2})
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"n": 1}, {"n": 2}]


def test_nothing_but_the_pairs_and_their_folder_is_left(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", {"n": 1})
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == [".lock", "job.json", "pairs.jsonl", "pairs.jsonl.replay"]


def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ReplayRefused, match="would be lost: move it away"):
        write(out)
    assert out.read_text() == "mine\n"
    assert not folder_of(out).exists()


def test_pairs_that_a_person_has_changed_are_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    out.write_text('{"n": 7}\n')
    with pytest.raises(ReplayRefused, match="something else than the last replay"):
        write(out)
    assert out.read_text() == '{"n": 7}\n'


@pytest.mark.parametrize("key", JOB)
def test_pairs_of_another_job_are_never_replaced(tmp_path: Path, key: str) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    with pytest.raises(ReplayRefused, match=f"a replay with other {key}: request the same"):
        write(out, job={**JOB, key: "other"})


def test_the_job_goes_on_after_its_pairs_were_moved_away(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    out.rename(tmp_path / "kept.jsonl")
    write(out, {"n": 2})
    assert out.exists()


def test_an_interruption_between_the_hash_and_the_pairs_stops_nobody(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    write(out, {"n": 1})
    before = out.read_bytes()
    write(out, {"n": 2})
    out.write_bytes(before)  # as if the second writing had ended after it wrote down its hash
    write(out, {"n": 3})
    assert json.loads(out.read_text()) == {"n": 3}


def test_two_replays_never_write_to_one_place(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    with ReplayOutput.open(out, JOB), pytest.raises(ReplayRefused, match="wait for the other"):
        write(out)


@pytest.mark.parametrize("out", [".", "no/such/folder/pairs.jsonl"])
def test_a_place_that_can_hold_no_file_is_refused(tmp_path: Path, out: str) -> None:
    with pytest.raises(ReplayRefused, match="must be a file in a folder that is there"):
        check_place(tmp_path / out, JOB)


def test_a_folder_that_no_replay_wrote_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "pairs.jsonl")
    folder.mkdir()
    (folder / "job.json").write_text("[]")
    with pytest.raises(ReplayRefused, match="is not what a replay wrote there"):
        check_place(tmp_path / "pairs.jsonl", JOB)


def test_a_report_is_kept_beside_the_pairs_and_where_it_is_wanted(tmp_path: Path) -> None:
    with ReplayOutput.open(tmp_path / "p.jsonl", JOB) as output:
        output.write_report({"state": "finished"}, tmp_path / "report.json")
    places = (tmp_path / "report.json", folder_of(tmp_path / "p.jsonl") / "report.json")
    assert [json.loads(place.read_text()) for place in places] == [{"state": "finished"}] * 2


def test_a_higher_ceiling_and_patience_are_the_same_job_other_rules_are_not(build_config) -> None:
    def job(**replay) -> dict:
        return job_of(build_config(replay=replay), "mark")

    same = job(budget={"usd": 5.0}, timeout_s=9.0, attempts=2, states_per_step=99)
    assert same == job()
    assert job(ask=4) != job()
    assert job(gate={"min_value": 0.5}) != job()
    assert job(filters=[]) != job()
