"""The replay command: priced before, within its ceiling whatever happens, and never paid twice."""

from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from offline_runs import (
    COST,
    ENVIRON,
    knowing,
    paid,
    replay_section,
    rows_of,
    traces_of,
    write_run,
    write_traces,
)
from repetition import crossed, repeated
from scripted_provider import KEY, ScriptedProvider

from composer_mesh.rollouts.budget import dollars
from composer_mesh.services.offline.command import replay_command
from composer_mesh.services.offline.options import ReplayOptions, ReplayRefused
from composer_mesh.services.offline.traces import TraceFileError
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.tasks.toolbox import ToolboxTask

STATES, QUESTIONS = 16, 48
INT, TERM = signal.SIGINT, signal.SIGTERM
WHOLE = QUESTIONS * COST


@pytest.fixture
def options(tmp_path: Path, build_config: Any, toolbox: ToolboxTask) -> ReplayOptions:
    """A replay of eight groups by three paid teachers, with room for all of it."""
    config = build_config(replay=replay_section(paid("a", "b", "c"), 1.0))
    run = write_run(tmp_path / "run", config, traces_of(toolbox, 8))
    return ReplayOptions(run, tmp_path / "pairs.jsonl", report=tmp_path / "report.json")


def run(
    options: ReplayOptions,
    provider: ScriptedProvider,
    environ: dict[str, str] = ENVIRON,
    signals: CommandSignals | None = None,
) -> tuple[int, dict[str, Any]]:
    signals = signals or CommandSignals()
    status = replay_command(options, signals, environ=environ, transport=provider.transport)
    assert options.report is not None
    return status, json.loads(options.report.read_text())


def test_a_replay_ends_with_pairs_and_a_report(
    options: ReplayOptions, toolbox: ToolboxTask, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = knowing(toolbox)
    status, report = run(options, provider)
    assert (status, report["state"]) == (0, "finished")
    assert len(rows_of(options.out)) == report["pairs"]["kept"] > 5
    assert report["states"] == {
        "chosen": STATES, "asked": STATES, "answered": STATES, "skipped_by_gate": 0,
        "short_of_budget": 0,
    }  # fmt: skip
    assert report["usd"]["spent"] == pytest.approx(dollars(provider.charged))
    assert report["teachers"]["a"]["agrees_with_majority"] == 1.0
    shown = capsys.readouterr().out
    assert f"{STATES} states of 8 groups, 0 skipped by the gate: {QUESTIONS} questions" in shown
    assert "finished after" in shown


def test_the_same_command_again_asks_nothing_and_writes_the_same(
    options: ReplayOptions, toolbox: ToolboxTask
) -> None:
    run(options, knowing(toolbox))
    before, again = options.out.read_bytes(), knowing(toolbox)
    status, report = run(options, again)
    assert (status, again.requests) == (0, [])
    assert rows_of(options.out) == [
        json.loads(line) | {"usd": 0.0, "provenance": row["provenance"]}
        for line, row in zip(before.splitlines(), rows_of(options.out), strict=True)
    ]
    assert report["usd"]["this_time"] == 0
    assert report["usd"]["saved_by_cache"] == pytest.approx(report["usd"]["spent"])


@pytest.mark.parametrize("share", repeated([0.3, 0.05, 0.8]))
def test_the_ceiling_holds_and_says_who_was_not_asked(
    options: ReplayOptions, toolbox: ToolboxTask, share: float
) -> None:
    bound = 0.01
    ceiling = bound + share * WHOLE
    provider = knowing(toolbox)
    status, report = run(replace(options, max_usd=ceiling), provider)
    assert (status, report["state"]) == (3, "out_of_budget")
    assert dollars(provider.charged) <= ceiling
    assert dollars(provider.charged) > 0
    short = report["short_of_budget"]
    assert 0 < len(short) == report["states"]["short_of_budget"] <= STATES
    assert all(state.startswith("train-") for state in short)


def test_a_higher_ceiling_goes_on_and_pays_only_for_the_rest(
    options: ReplayOptions, toolbox: ToolboxTask
) -> None:
    first, second, whole = knowing(toolbox), knowing(toolbox), knowing(toolbox)
    assert run(replace(options, max_usd=0.0115), first)[0] == 3
    assert run(replace(options, max_usd=1.0), second)[0] == 0
    elsewhere = (f"replay.cache={options.out.with_name('others.sqlite')}",)
    apart = replace(options, out=options.out.with_name("whole.jsonl"), overrides=elsewhere)
    run(apart, whole)
    assert len(first.requests) + len(second.requests) == len(whole.requests)
    assert [row["state_id"] for row in rows_of(options.out)] == [
        row["state_id"] for row in rows_of(apart.out)
    ]


def test_another_replay_of_the_same_states_pays_nothing(
    options: ReplayOptions, toolbox: ToolboxTask
) -> None:
    """Answers are shared by all runs and replays of a place."""
    first, second = knowing(toolbox), knowing(toolbox)
    run(options, first)
    other = replace(options, out=options.out.with_name("other.jsonl"))
    assert (run(other, second)[0], len(first.requests), second.requests) == (0, QUESTIONS, [])


def test_the_ceiling_counts_all_repetitions_together(
    options: ReplayOptions, toolbox: ToolboxTask
) -> None:
    tight = replace(options, max_usd=0.0115)
    providers = [knowing(toolbox) for _ in range(3)]
    assert [run(tight, provider)[0] for provider in providers] == [3, 3, 3]
    assert sum(dollars(provider.charged) for provider in providers) <= 0.0115


def test_a_dry_run_prices_the_job_and_asks_and_leaves_nothing(
    options: ReplayOptions, toolbox: ToolboxTask, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = knowing(toolbox)
    status, report = run(replace(options, dry_run=True), provider)
    assert (status, provider.paths, options.out.exists()) == (0, [], False)
    assert not options.out.with_name("pairs.jsonl.replay").exists()
    assert (report["states"], report["questions"]) == (STATES, QUESTIONS)
    assert 0 < report["usd_estimate"] < report["usd_bound"]
    assert "what it would cost" in capsys.readouterr().out


def test_a_replay_never_costs_more_than_its_dry_run_said(
    options: ReplayOptions, toolbox: ToolboxTask
) -> None:
    provider = knowing(toolbox, cost=0.008)  # nearly what the longest answer costs
    bound = run(replace(options, dry_run=True), provider)[1]["usd_bound"]
    run(options, provider)
    assert dollars(provider.charged) <= bound


def test_prices_that_openrouter_lists_are_read_and_those_that_nobody_says_are_named(
    options: ReplayOptions, toolbox: ToolboxTask, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = knowing(toolbox)
    pricing = {"prompt": "0.000001", "completion": "0.000002"}
    provider.listing = {"data": [{"id": "a/known", "pricing": pricing}]}
    asked = replace(options, dry_run=True, teachers="a/known,b/unknown", max_usd=1.0)
    _, report = run(asked, provider, {"OPENROUTER_API_KEY": KEY})
    assert report["unknown_prices"] == ["b/unknown"]
    assert report["teachers"]["a/known"]["usd_bound"] > 0
    assert {path.rpartition("/")[2] for path in provider.paths} == {"models"}
    assert "the prices of b/unknown are unknown" in " ".join(capsys.readouterr().out.split())


def test_a_limit_asks_about_the_first_states(options: ReplayOptions, toolbox: ToolboxTask) -> None:
    status, report = run(replace(options, limit=5), knowing(toolbox))
    assert (status, report["states"]["asked"]) == (0, 5)


def test_when_nobody_answers_the_status_says_so(options: ReplayOptions) -> None:
    refusing = ScriptedProvider(0.0, lambda _: httpx.Response(401, json={"error": "no"}))
    status, report = run(options, refusing)
    assert status == 1
    assert report["states"]["answered"] == 0
    assert report["teachers"]["a"]["failures"]["auth"] > 0


def test_the_key_is_in_no_file_and_on_no_line(
    options: ReplayOptions,
    tmp_path: Path,
    toolbox: ToolboxTask,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def echoing(_: dict[str, Any]) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": f"Bearer {KEY} is not allowed"}})

    run(replace(options, limit=4), knowing(toolbox))
    run(options, ScriptedProvider(0.0, echoing))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in written
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err


@pytest.mark.parametrize(
    ("changes", "environ", "says"),
    [
        ({}, {}, "TEST_KEY"),
        ({"max_usd": 0.0, "teachers": "a/known,b/known"}, {"OPENROUTER_API_KEY": KEY}, "0 dollars"),
        (
            {"max_usd": 1.0, "teachers": "a/x,b/y"},
            {"OPENROUTER_API_KEY": KEY},
            "request is unknown",
        ),
        ({"max_usd": 1.0, "teachers": "a/x,b/y"}, {}, "OPENROUTER_API_KEY"),
    ],
)
def test_what_would_stop_every_question_is_refused_before_one_is_sent(
    options: ReplayOptions, changes: dict[str, Any], environ: dict[str, str], says: str
) -> None:
    provider = ScriptedProvider()
    pricing = {"prompt": "0.000001", "completion": "0.000002"}
    provider.listing = {
        "data": [{"id": name, "pricing": pricing} for name in ("a/known", "b/known")]
    }
    with pytest.raises(ReplayRefused, match=says):
        run(replace(options, **changes), provider, environ)
    assert provider.requests == []
    assert not options.out.exists()


def test_a_file_that_would_be_overwritten_is_refused_before_a_question_is_sent(
    options: ReplayOptions,
) -> None:
    options.out.write_text("mine\n")
    provider = ScriptedProvider()
    with pytest.raises(ReplayRefused, match="would be lost"):
        run(options, provider)
    assert provider.paths == []


def test_other_traces_never_replace_pairs(
    options: ReplayOptions, tmp_path: Path, toolbox: ToolboxTask
) -> None:
    run(options, knowing(toolbox))
    other = write_traces(tmp_path / "run" / "traces" / "traces.jsonl", traces_of(toolbox, 9)[3:])
    with pytest.raises(ReplayRefused, match="a replay with other traces"):
        run(replace(options, traces=other), knowing(toolbox))


def test_contradicting_traces_are_refused_before_a_question_is_sent(
    options: ReplayOptions, tmp_path: Path, toolbox: ToolboxTask
) -> None:
    traces = traces_of(toolbox, 3)
    traces[-1].messages[:] = traces[-1].messages[:1]
    file = write_traces(tmp_path / "run" / "traces" / "traces.jsonl", traces)
    provider = ScriptedProvider()
    with pytest.raises(TraceFileError, match="group 2 cannot be replayed"):
        run(replace(options, traces=file), provider)
    assert provider.requests == []


FIRST = [1, QUESTIONS // 2, QUESTIONS]
NUMBERS = [(INT,), (TERM, INT), (INT, INT, TERM)]


@pytest.mark.parametrize(("first", "numbers"), crossed(FIRST, NUMBERS))
def test_any_signals_leave_pairs_and_a_report_of_what_was_answered(
    numbers: tuple[signal.Signals, ...], first: int, options: ReplayOptions, toolbox: ToolboxTask
) -> None:
    """From a certain question on each answer brings a signal; with the last one come all."""
    signals, left = CommandSignals(clock=itertools.count(0, 10).__next__), list(numbers)
    knows = knowing(toolbox)

    def say(body: dict[str, Any]) -> httpx.Response:
        if left and len(provider.requests) >= first:
            signals(left.pop(0))
        while left and len(provider.requests) == QUESTIONS:
            signals(left.pop(0))
        return json_response(body)

    json_response = knows._say
    assert json_response is not None
    provider = ScriptedProvider(COST, say)
    status, report = run(options, provider, signals=signals)
    assert (status, report["state"]) == (128 + numbers[0], "stopped")
    assert len(rows_of(options.out)) == report["pairs"]["kept"]
    again, whole = run(options, knowing(toolbox))
    assert (again, whole["state"]) == (0, "finished")
