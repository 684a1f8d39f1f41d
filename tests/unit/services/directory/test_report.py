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
EVALUATIONS = [Evaluation(0, 0.25, 200), Evaluation(3, 0.95, 200)]


def test_a_step_of_flat_groups_alone_is_no_active_step_of_the_policy_channel() -> None:
    counts = [(8, 8), (8, 7), (0, 0)]
    steps = [
        {**one, "rollouts/groups": groups, "rollouts/flat_groups": flat}
        for one, (groups, flat) in zip(METRICS, counts, strict=True)
    ]
    channels = summarize(steps, wall_s=1.0)["channels"]
    assert channels["policy"] == {"active_steps": 1}
    assert channels["sdpo"] == {"active_steps": 2}


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
    summary = summarize(METRICS, wall_s=12.0, evaluations=EVALUATIONS, restarts=1)
    assert summary["steps"] == 3
    assert summary["wall_s"] == 12.0
    assert summary["channels"] == {
        "policy": {"active_steps": 3},
        "sdpo": {"active_steps": 2},
        "replay": {"active_steps": 0},
    }
    assert (summary["replay"]["usd"], summary["replay"]["pairs"]) == (0.75, 6)
    assert summary["replay"]["dropped"] == {"length": 9}
    assert summary["eval"]["initial"]["success"] == 0.25
    assert summary["eval"]["final"]["success"] == 0.95
    assert summary["eval"]["final"]["episodes"] == 200
    assert (summary["restarts"], summary["lag_max"], summary["tokens_trained"]) == (1, 1, 3000)


def test_an_evaluation_that_was_not_reached_is_null() -> None:
    one = summarize(METRICS, wall_s=1.0, evaluations=EVALUATIONS[:1])
    assert one["eval"]["initial"]["success"] == 0.25
    assert one["eval"]["final"] is None
    assert summarize([], wall_s=1.0)["eval"] == {"initial": None, "final": None}


def test_metrics_with_a_last_line_cut_off_are_read_up_to_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps(step) + "\n" for step in METRICS)
    path.write_text(lines + '{"step": 4, "rew')
    assert read_metrics(path) == METRICS


def test_a_run_without_metrics_has_no_steps(tmp_path: Path) -> None:
    assert write_summary(tmp_path, wall_s=0.5)["steps"] == 0


def test_the_summary_on_disk_is_the_one_returned_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in METRICS))
    written = write_summary(tmp_path, wall_s=3.0, evaluations=EVALUATIONS)
    assert json.loads((tmp_path / "summary.json").read_text()) == written
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checksums.json", "metrics.jsonl", "summary.json"}


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_shows_the_figures_and_no_markup_of_the_name(width: int) -> None:
    out = StringIO()
    summary = summarize(METRICS, wall_s=192.0, evaluations=EVALUATIONS)
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
    Console(file=out, width=80).print(summary_table("run", summarize([], wall_s=0.1)))
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
        summary = summarize(METRICS, wall_s=12.0, sessions=sessions)
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
    replay = summarize([], wall_s=1.0, rest=rest)["replay"]
    assert (replay["usd"], replay["states"], replay["outcomes"]) == (0.5, 4, {"tie": 4})
