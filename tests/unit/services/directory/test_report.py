"""The end of a run: figures add up, intervals are Wilson's, the PNG is one."""

import json
import math
import struct
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repetition import crossed
from rich.console import Console

from composer_mesh.services.directory.channel_activity import failed_queries, why_inactive
from composer_mesh.services.directory.curve import Death, draw_reward_curve, smoothed
from composer_mesh.services.directory.report import (
    Evaluation,
    read_metrics,
    summarize,
    summary_table,
    wilson_interval,
    write_summary,
)

METRICS: list[dict[str, Any]] = [
    {
        "step": step,
        "reward/mean": 0.2 * step,
        "loss/policy": 0.1,
        "loss/sdpo": None if step == 2 else 0.3,
        "loss/replay": None,
        "replay/pairs": 2,
        "replay/usd": 0.25,
        "replay/dropped/length": 3,
        "lag/max": step % 2,
        "rollouts/count": 8,
        "tokens/trained": 1000,
    }
    for step in (1, 2, 3)
]
ALL = ("policy", "sdpo", "replay")
EVALUATIONS = [Evaluation(0, 0.25, 200), Evaluation(3, 0.95, 200)]


def test_a_step_of_flat_groups_alone_is_no_active_step_of_the_policy_channel() -> None:
    counts = [(8, 8), (8, 7), (0, 0)]
    steps = [
        {**one, "rollouts/groups": groups, "rollouts/flat_groups": flat}
        for one, (groups, flat) in zip(METRICS, counts, strict=True)
    ]
    channels = summarize(steps, wall_s=1.0, configured=ALL)["channels"]
    assert channels["policy"] == {
        "configured": True,
        "active_steps": 1,
        "inactive_because": ["8 of 8 groups had equal rewards"],
    }
    assert channels["sdpo"]["active_steps"] == 2


@given(trials=st.integers(1, 500), data=st.data())
def test_the_interval_ends_where_the_share_is_just_rejected(
    trials: int, data: st.DataObject
) -> None:
    share = data.draw(st.integers(0, trials)) / trials
    for end in wilson_interval(share, trials):
        if 0 < end < 1:
            distance = abs(share - end) / math.sqrt(end * (1 - end) / trials)
            assert distance == pytest.approx(1.959964, rel=1e-5)


def test_the_interval_of_no_trials_says_nothing() -> None:
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_the_interval_never_leaves_zero_to_one() -> None:
    assert wilson_interval(0.0, 10)[0] == 0
    assert wilson_interval(1.0, 10)[1] == 1


def test_the_summary_adds_up_the_steps() -> None:
    summary = summarize(METRICS, wall_s=12.0, configured=ALL, evaluations=EVALUATIONS, restarts=1)
    assert summary["steps"] == 3
    assert summary["wall_s"] == 12.0
    assert summary["channels"] == {
        "policy": {"configured": True, "active_steps": 3},
        "sdpo": {
            "configured": True,
            "active_steps": 2,
            "inactive_because": ["no error sites in 8 rollouts"],
        },
        "replay": {
            "configured": True,
            "active_steps": 0,
            "inactive_because": ["9 pairs dropped by length"],
        },
    }
    assert (summary["replay"]["usd"], summary["replay"]["pairs"]) == (0.75, 6)
    assert summary["replay"]["dropped"] == {"length": 9}
    assert summary["eval"]["initial"]["success"] == 0.25
    assert summary["eval"]["final"]["success"] == 0.95
    assert summary["eval"]["final"]["episodes"] == 200
    assert (summary["restarts"], summary["lag_max"], summary["tokens_trained"]) == (1, 1, 3000)


def test_an_evaluation_that_was_not_reached_is_null() -> None:
    one = summarize(METRICS, wall_s=1.0, configured=ALL, evaluations=EVALUATIONS[:1])
    assert one["eval"]["initial"]["success"] == 0.25
    assert one["eval"]["final"] is None
    assert summarize([], wall_s=1.0, configured=ALL)["eval"] == {"initial": None, "final": None}


def test_metrics_with_a_last_line_cut_off_are_read_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps(step) + "\n" for step in METRICS)
    path.write_text(lines + '{"step": 4, "rew')
    assert read_metrics(path) == METRICS


def test_a_run_without_metrics_has_no_steps(tmp_path: Path) -> None:
    assert write_summary(tmp_path, wall_s=0.5, configured=ALL)["steps"] == 0


def test_the_summary_on_disk_is_the_one_returned_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in METRICS))
    written = write_summary(tmp_path, wall_s=3.0, configured=ALL, evaluations=EVALUATIONS)
    assert json.loads((tmp_path / "summary.json").read_text()) == written
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checksums.json", "metrics.jsonl", "summary.json"}


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_shows_the_figures_and_no_markup_of_the_name(width: int) -> None:
    out = StringIO()
    summary = summarize(METRICS, wall_s=192.0, configured=ALL, evaluations=EVALUATIONS)
    Console(file=out, width=width).print(summary_table("[red]run[/red]", summary))
    text = " ".join(out.getvalue().split())
    assert "[red]run[/red]" in text
    assert "3 in 3 min 12 s" in text
    assert "95.0%" in text
    assert "active in 2 of 3 steps" in text
    assert "6 pairs for $0.75" in text
    assert max(len(line) for line in out.getvalue().splitlines()) <= width


def test_the_table_of_a_run_that_ended_at_once_says_what_was_not_measured() -> None:
    out = StringIO()
    Console(file=out, width=80).print(
        summary_table("run", summarize([], wall_s=0.1, configured=ALL))
    )
    assert "not measured" in out.getvalue()


@pytest.mark.parametrize(
    ("metrics", "evaluations"), crossed([METRICS, METRICS[:1], []], [EVALUATIONS, []])
)
def test_the_curve_is_a_png_of_the_stated_size(
    tmp_path: Path, metrics: list[dict[str, Any]], evaluations: list[Evaluation]
) -> None:
    path = tmp_path / "reward.png"
    draw_reward_curve(metrics, path, evaluations=evaluations, title="run $x_$")
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1350, 900)


def test_the_same_run_draws_the_same_picture(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_reward_curve(METRICS, tmp_path / name, evaluations=EVALUATIONS)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("count", [1, 500])
def test_deaths_are_marked_on_the_curve_whatever_their_names_and_number(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "reward.png"
    draw_reward_curve(METRICS, path, evaluations=EVALUATIONS)
    without = path.read_bytes()
    draw_reward_curve(METRICS, path, evaluations=EVALUATIONS, deaths=[Death(1, "$x_$ \n")] * count)
    assert path.read_bytes() != without


def test_the_summary_has_the_sessions_and_the_table_says_so_of_several() -> None:
    for sessions, said in ((1, "3 in 12.0 s"), (3, "3 in 12.0 s, 3 sessions")):
        summary = summarize(METRICS, configured=[], wall_s=12.0, sessions=sessions)
        assert summary["sessions"] == sessions
        out = StringIO()
        Console(file=out, width=80).print(summary_table("run", summary))
        assert said in [line.split("steps", 1)[-1].strip() for line in out.getvalue().splitlines()]


def test_smoothing_takes_the_mean_of_the_neighbours_and_skips_gaps() -> None:
    assert smoothed([1.0, 2.0, 6.0], 1) == [1.5, 3.0, 4.0]
    assert smoothed([1.0, math.nan, 3.0], 1) == [1.0, 2.0, 3.0]
    assert smoothed([], 3) == []


def test_what_teachers_cost_after_the_last_step_is_in_the_summary() -> None:
    rest = {"replay/usd": 0.5, "replay/states": 4, "replay/outcome/tie": 4}
    replay = summarize([], wall_s=1.0, configured=ALL, rest=rest)["replay"]
    assert (replay["usd"], replay["states"], replay["outcomes"]) == (0.5, 4, {"tie": 4})


UNAUTHORIZED: list[dict[str, Any]] = [
    {
        "step": step,
        "loss/policy": 0.1,
        "loss/replay": None,
        "replay/states": 4,
        "replay/answers": 0,
        "replay/failed_by/401/careful": 4,
        "replay/failed_by/suspended/careful": 8,
    }
    for step in (1, 2)
]


def shown(summary: dict[str, Any]) -> str:
    out = StringIO()
    Console(file=out, width=200).print(summary_table("run", summary))
    return " ".join(out.getvalue().split())


def test_a_teacher_that_refuses_every_query_is_the_reason_of_its_channel() -> None:
    late = {"replay/failed_by/401/careful": 4}
    summary = summarize(UNAUTHORIZED, wall_s=1.0, configured=ALL, rest=late)
    assert summary["channels"]["replay"] == {
        "configured": True,
        "active_steps": 0,
        "inactive_because": ["12 x 401, 16 x suspended from careful"],
    }
    assert summary["replay"]["failed_by"] == {"401/careful": 12, "suspended/careful": 16}
    text = shown(summary)
    assert "configured, active in 0 of 2 steps: 12 x 401, 16 x suspended from careful" in text
    assert "failed queries" not in text


def test_refusals_by_budget_are_shown_although_the_channel_is_active() -> None:
    first = {"loss/replay": 0.1, "replay/answers": 9, "replay/failed_by/budget/a": 3}
    rest = {"replay/answers": 0, "replay/failed_by/budget/a": 18, "replay/failed_by/budget/b": 18}
    summary = summarize(
        [UNAUTHORIZED[0] | first | {"replay/failed_by/401/careful": 0}, rest],
        wall_s=1.0,
        configured=("policy", "replay"),
    )
    text = shown(summary)
    assert "active in 1 of 2 steps; in the other 1: 36 of 36 queries refused by budget" in text
    assert "failed queries 39 of 56 queries refused by budget; 8 x suspended from careful" in text
    assert "sdpo channel off" in text


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([{"replay/states": 0, "replay/skipped": 4}], ["the gate skipped 4 states"]),
        ([{}], ["no state was queried"]),
        (
            [{"replay/beta": 0.0}, {"replay/answers": 1}],
            ["no state was queried", "weight 0 in 1 steps"],
        ),
        (
            [{"replay/answers": 9, "replay/outcome/tie": 3, "replay/outcome/pair": 2}],
            ["3 x tie"],
        ),
        ([{"replay/expired": 2, "replay/waiting": 1}], ["3 pairs came too late"]),
    ],
)
def test_why_a_replay_channel_had_no_pairs(steps: list[dict[str, Any]], why: list[str]) -> None:
    assert why_inactive("replay", steps) == why


def test_teachers_that_fail_for_the_same_causes_are_named_together() -> None:
    failed = {"401/a": 3, "401/b": 4, "timeout/vendor/c": 2, "budget/a": 1, "budget/b": 1}
    assert failed_queries(failed, 4) == [
        "2 of 15 queries refused by budget",
        "7 x 401 from a and b",
        "2 x timeout from vendor/c",
    ]


def test_an_evaluation_says_how_it_was_decoded() -> None:
    both = [Evaluation(0, 0.25, 8, temperature=0.0), Evaluation(2, 0.5, 8, temperature=0.7)]
    summary = summarize(METRICS, wall_s=1.0, configured=ALL, evaluations=both)
    assert [summary["eval"][one]["temperature"] for one in ("initial", "final")] == [0.0, 0.7]
    text = shown(summary)
    assert "8 episodes, greedy)" in text
    assert "8 episodes, sampled at 0.7)" in text
