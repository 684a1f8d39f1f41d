"""What the terminal shows: a page where it can be redrawn, plain lines where it cannot."""

import math
import threading
import time
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.directory.status import ActorStatus
from composer_mesh.services.inspection.events_command import clock
from composer_mesh.services.inspection.page import plain_line, plain_text, sparkline
from composer_mesh.services.inspection.view import RunView, Silence

STEP: dict[str, Any] = {
    "step": 7,
    "policy_version": 7,
    "loss/total": 0.512,
    "loss/policy": -0.01,
    "loss/sdpo": None,
    "loss/replay": 0.68,
    "reward/mean": 0.5,
    "rollouts/count": 32,
    "rollouts/error_sites": 5,
    "sdpo/tokens": 0,
    "replay/pairs": 4,
    "replay/usd": 0.01,
    "replay/usd_total": 1.25,
    "replay/states": 12,
    "replay/skipped": 3,
    "replay/waiting": 2,
    "lag/mean": 0.5,
    "lag/max": 1,
    "tokens/trained": 4000,
    "time/step_s": 2.5,
    "time/wait_batch_s": 1.2,
    "time/train_s": 0.8,
    "time/weight_sync_s": 0.01,
}


def actor(
    name: str, state: str = "ready", version: int | None = None, activity: str = ""
) -> ActorStatus:
    return ActorStatus(name, "generator", None, state, version, activity)


def terminal(width: int) -> Console:
    return Console(
        file=StringIO(), width=width, height=50, force_terminal=True, color_system=None, _environ={}
    )


def page(view: RunView, width: int) -> str:
    """What the page looks like now, without control codes."""
    out = StringIO()
    Console(file=out, width=width).print(view)
    return out.getvalue()


def busy_view() -> RunView:
    view = RunView("quickstart", 60, ceiling_usd=10.0, console=Console(file=StringIO()))
    view.transport("RDMA over TCP")
    view.phase("training")
    view.evaluation(Evaluation(0, 0.31, 200))
    view.actors([actor("generator[0]", "busy", 7, "decoding"), actor("teacher[1]", "dead")])
    view.update(STEP)
    view.event("weights of version 7 published")
    return view


@pytest.mark.parametrize("width", [80, 128, 160])
def test_the_page_shows_everything_it_was_told_within_its_width(width: int) -> None:
    text = page(busy_view(), width)
    for shown in (
        "quickstart",
        "training",
        "step 7/60",
        "0.500",
        "31.0% of 200 held-out episodes",
        "policy -0.0100  sdpo off  replay 0.6800",
        "1 versions at most",
        "32, 5 error sites, 4 pairs trained",
        "$1.2500 of $10.00, 12 states queried",
        "1,600 tokens/s",
        "RDMA over TCP",
        "generator[0]",
        "decoding",
        "dead",
        "weights of version 7 published",
    ):
        assert shown in text
    assert {len(line) for line in text.splitlines()} == {width}


def test_a_wide_page_is_shorter_than_a_narrow_one() -> None:
    view = busy_view()
    assert len(page(view, 160).splitlines()) < len(page(view, 80).splitlines())


def test_a_page_before_the_first_step_has_no_figures() -> None:
    text = page(RunView("run", 3, console=Console(file=StringIO())), 80)
    assert "step 0/3" in text
    assert "not measured yet" in text
    assert "losses" not in text


def test_a_page_has_the_ends_of_evaluations_the_first_actors_and_the_last_events() -> None:
    view = busy_view()
    view.evaluation(Evaluation(30, 0.6, 200))
    view.evaluation(Evaluation(60, 0.945, 200))
    view.actors([actor(f"environment[{i}]") for i in range(40)])
    for i in range(9):
        view.event(f"event number {i}")
    text = page(view, 80)
    assert "31.0% → 94.5% of 200 held-out episodes" in text
    assert [f"environment[{i}]" in text for i in (11, 12)] == [True, False]
    assert "and 28 more" in text
    assert [f"number {i}" in text for i in range(9)] == [False] * 4 + [True] * 5


def test_the_page_keeps_the_newest_warning_of_each_kind_in_whole() -> None:
    view = busy_view()
    view.evaluation(Evaluation(30, 0.6, 200, temperature=0.7))
    repair = "raise schedule.group_size or generator.temperature, or train on easier episodes"
    view.warning("hints_missing sdpo: no error sites")
    view.warning("groups_flat policy: old")
    view.warning(f"groups_flat policy: [red]40 of 40[/red] groups had equal rewards: {repair}")
    for i in range(9):
        view.event(f"event number {i}")
    text = page(view, 80)
    assert {len(line) for line in text.splitlines()} == {80}
    plain = " ".join(text.replace("│", " ").split())
    assert f"policy: [red]40 of 40[/red] groups had equal rewards: {repair}" in plain
    assert "hints_missing sdpo: no error sites" in plain
    assert "policy: old" not in plain
    assert "60.0% of 200 held-out episodes, sampled at 0.7" in plain


@pytest.mark.parametrize("width", [80, 160])
def test_nothing_that_a_model_wrote_is_markup_or_a_control_code(width: int) -> None:
    view = RunView("[bold]run[/bold]", 3, console=Console(file=StringIO()))
    view.event("[red]hot[/red] \x1b[2J\x07\nnext")
    view.phase("[blink]x[/]")
    view.actors([actor("[i]a[/i]", "[u]s[/u]", 1, "[b]\x1b]0;title\x07")])
    text = page(view, width)
    for shown in (
        r"[red]hot[/red] \x1b[2J\x07\nnext",
        "[blink]x[/]",
        "[bold]run[/bold]",
        "[i]a[/i]",
        r"[b]\x1b]0;title\x07",
    ):
        assert shown in text
    assert "\x1b" not in text


@given(st.text())
def test_plain_text_is_one_printable_line(text: str) -> None:
    assert all(c.isprintable() for c in plain_text(text))


def test_a_long_text_is_cut_with_a_mark() -> None:
    assert plain_text("x" * 500) == "x" * 400 + "…"


def test_without_a_terminal_each_step_is_one_line_and_nothing_is_redrawn() -> None:
    out = StringIO()
    with RunView("run", 60, console=Console(file=out, width=80), now=lambda: 5.0) as view:
        view.phase("training")
        view.update(STEP)
        view.actors([actor("generator[0]")])
        view.update({**STEP, "step": 8})
        view.evaluation(Evaluation(8, 0.5, 200))
        view.evaluation(Evaluation(9, 0.5, 200, temperature=0.0))
        view.evaluation(Evaluation(10, 0.5, 200, temperature=0.7))
        view.warning("groups_flat policy: [bold]flat[/bold]")
        view.event("[bold]done[/bold]\x1b[2J")
    lines = out.getvalue().splitlines()
    assert {line.partition(" ")[0] for line in lines} == {clock(5.0)}
    found = "success=0.500 interval_95=0.431..0.569 episodes=200"
    assert [line.partition(" ")[2] for line in lines] == [
        "phase training",
        plain_line(STEP, 60),
        plain_line({**STEP, "step": 8}, 60),
        f"evaluation after_step=8 {found} temperature=- decoding=-",
        f"evaluation after_step=9 {found} temperature=0 decoding=greedy",
        f"evaluation after_step=10 {found} temperature=0.7 decoding=sampled",
        "warning groups_flat policy: [bold]flat[/bold]",
        r"event [bold]done[/bold]\x1b[2J",
    ]


def test_a_silent_phase_says_what_busy_actors_do_after_twice_as_long_each_time() -> None:
    now = [0.0]
    silence = Silence(lambda: now[0])
    actors = [actor(f"rollouts-{n}", "busy", 0, f"{n} episodes") for n in range(5)]
    actors.insert(0, actor("trainer", activity="idle"))

    def said(phase: str, seconds: int) -> list[float]:
        found: list[float] = []
        for _ in range(seconds):
            now[0] += 1
            if silence.report(phase, actors):
                found.append(now[0])
        return found

    assert said("loading", 50) == [8, 16, 32]
    silence.broken("training")
    now[0] += 60
    assert silence.report("training", actors) == (
        "progress training, 60 s: rollouts-0 0 episodes; rollouts-1 1 episodes; "
        "rollouts-2 2 episodes; and 2 more"
    )
    now[0] += 60
    assert silence.report("training", []) == "progress training, 120 s"


def test_a_silent_phase_is_a_line_of_the_output() -> None:
    now, out = [0.0], StringIO()
    with RunView("run", 3, console=Console(file=out, width=80), now=lambda: now[0]) as view:
        view.phase("preparing the policy")
        view.actors([actor("trainer", "busy", 0, "warm start: step 3 of 540, \x1b[2J")])
        now[0] = 9.0
        deadline = time.monotonic() + 30
        while "progress" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    line = r"progress preparing the policy, 9 s: trainer warm start: step 3 of 540, \x1b[2J"
    assert out.getvalue().splitlines()[1] == f"{clock(9.0)} {line}"


def test_the_commands_that_look_into_a_run_are_told_once() -> None:
    commands = ["composer-mesh tree 'a b' --watch", "composer-mesh events 'a b'"]
    plain = Console(file=StringIO(), width=40)
    with RunView("run", 3, console=plain, now=lambda: 5.0) as view:
        view.hints(commands)
    assert isinstance(plain.file, StringIO)
    assert plain.file.getvalue() == f"{clock(5.0)} event look_into_it {'; '.join(commands)}\n"

    live = terminal(80)
    with RunView("run", 3, console=live) as view:
        view.hints(commands)
        view.phase("later")
    assert isinstance(live.file, StringIO)
    assert [live.file.getvalue().count(command) for command in commands] == [1, 1]


def test_a_plain_line_has_fixed_keys_with_units_and_names_what_is_off() -> None:
    assert plain_line(dict(reversed(STEP.items())), 60) == (
        "step=7/60 version=7 reward_mean=0.500 loss_total=0.5120 loss_policy=-0.0100 loss_sdpo=off"
        " loss_replay=0.6800 rollouts=32 error_sites=5 sdpo_tokens=0 replay_pairs=4"
        " replay_usd=0.0100 replay_usd_total=1.2500 lag_mean_versions=0.50 lag_max_versions=1"
        " trained_tokens=4000"
        " step_s=2.50 wait_batch_s=1.20 train_s=0.80 weight_sync_s=0.010"
    )


def test_a_missing_or_non_finite_figure_never_stops_the_run() -> None:
    view = busy_view()
    view.update({"step": 8, "reward/mean": math.nan, "lag/max": math.inf})
    assert "nan" in page(view, 80)
    assert "reward_mean=- " in plain_line({"step": 1}, 2)


def test_a_stream_that_cannot_write_a_character_gets_its_escape() -> None:
    raw = BytesIO()
    with RunView(
        "run", 1, console=Console(file=TextIOWrapper(raw, encoding="ascii", write_through=True))
    ) as view:
        view.event("π → ok")
    assert raw.getvalue().endswith(b" event \\u03c0 \\u2192 ok\n")


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_is_left_with_the_last_state_and_its_cursor(width: int) -> None:
    console = terminal(width)
    with RunView("run", 60, console=console) as view:
        view.update(STEP)
        view.event("the last event")
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "step 7/60" in text
    assert "the last event" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_no_thread_outlives_the_view_also_when_the_run_fails() -> None:
    before = set(threading.enumerate())
    during: set[threading.Thread] = set()

    def run() -> None:
        with RunView("run", 1, console=terminal(80)):
            during.update(threading.enumerate())
            raise RuntimeError("run failed")

    with pytest.raises(RuntimeError, match="run failed"):
        run()
    assert during > before
    assert set(threading.enumerate()) == before


def test_closing_twice_and_telling_a_closed_view_do_nothing() -> None:
    console = terminal(80)
    with RunView("run", 1, console=console) as view:
        view.close()
        assert isinstance(console.file, StringIO)
        text = console.file.getvalue()
        view.close()
        view.event("too late")
    assert console.file.getvalue() == text


def test_a_thousand_updates_are_not_a_thousand_frames() -> None:
    console = terminal(80)
    with RunView("run", 1000, console=console) as view:
        for step in range(1000):
            view.update({**STEP, "step": step})
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().count("composer-mesh") < 20


def test_a_sparkline_rises_with_its_values_and_stays_within_its_width() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([i / 99 for i in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([], 8) == ""


@given(st.lists(st.floats(-5, 5), max_size=300), st.integers(1, 80))
def test_any_rewards_fit_a_sparkline_of_any_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
