"""What the dashboard makes of the files of runs: tables, curves, charts, lanes."""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dashboards import Page, client, dashboard
from inspected_runs import a_trace, group_of, write_run

from composer_mesh.actors.sqlite_file import checksum_of
from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard.catalog import (
    Catalog,
    differing,
    sampled_metrics,
    state_of,
)
from composer_mesh.plugins.dashboard.charts import (
    Chart,
    charts_of_run,
    figure,
    sparkline,
    ticks,
)
from composer_mesh.plugins.dashboard.live import PageChanges, PageParts, parts_of_run
from composer_mesh.plugins.dashboard.open_runs import OpenRun, PacedLook
from composer_mesh.plugins.dashboard.requests import ChartOptions, RolloutFilter
from composer_mesh.plugins.dashboard.rollout_views import advantage_of, tokens_of
from composer_mesh.plugins.dashboard.series import RECENT, Columns, Curve, curve, reduced
from composer_mesh.plugins.dashboard.timeline import timeline_of
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.directory.status import RunStatus, RunUnavailable, write_status
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import Where
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.toolbox import ToolboxTask


def write_steps(root: Path, first: int, last: int, **figures: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": n, "reward/mean": n / 100, "time/step_s": 2.0, "tokens/trained": 10, **figures}
        for n in range(first, last + 1)
    ]
    with (root / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_runs_of_a_folder_are_found_down_to_those_of_an_ablation(
    tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    for place, lr in (("one", 1e-3), ("ablation/both/seed-0", 2e-3)):
        write_steps(tmp_path / place, 1, 3)
        text = dump_toml(build_config(trainer={"lr": lr}))
        (tmp_path / place / "config.toml").write_text(text)
    (tmp_path / "one" / "inside").mkdir()
    (tmp_path / "one" / "inside" / "config.toml").write_text("")
    catalog = Catalog(tmp_path)
    catalog.read_all()
    runs = {run.slug: run for run in catalog.runs()}
    assert set(runs) == {"one", "ablation~both~seed-0"}
    assert (runs["one"].step, runs["one"].steps, runs["one"].rewards[-1]) == (3, 3, 0.03)
    assert differing(list(runs.values())) == {
        "trainer.lr": {"one": "0.001", "ablation~both~seed-0": "0.002"}
    }


def test_a_folder_that_is_a_run_is_the_only_run(tmp_path: Path) -> None:
    write_steps(tmp_path / "run", 1, 1)
    catalog = Catalog(tmp_path / "run")
    catalog.read_all()
    assert [run.slug for run in catalog.runs()] == ["run"]


def test_a_damaged_run_is_shown_with_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metrics.jsonl").write_text("no json\n")
    (tmp_path / "bad" / "config.toml").write_text("= 1")
    catalog = Catalog(tmp_path)
    catalog.read_all()
    (run,) = catalog.runs()
    assert "metrics.jsonl cannot be read" in run.problem
    assert "config.toml" in run.problem


@pytest.mark.parametrize(
    ("state", "pid", "host", "shown"),
    [
        ("finished", 1, "", "finished"),
        ("running", 1, "", "running"),
        ("running", 2**22, "", "died"),
        ("running", 2**22, "another-machine", "running"),
    ],
)
def test_the_state_of_a_run_is_that_of_its_process(
    tmp_path: Path, state: str, pid: int, host: str, shown: str
) -> None:
    write_status(tmp_path, RunStatus(pid, None, state, 1, 2, 1, "tcp", host=host))
    assert state_of(tmp_path) == shown


@pytest.mark.parametrize(("took_s", "next_s"), [(0.001, 1.5), (0.02, 4.0), (3.0, 10.0)])
def test_a_mesh_that_answers_slowly_is_asked_seldom(took_s: float, next_s: float) -> None:
    now, looks = [0.0], list[float]()

    def look() -> dict[str, Any]:
        looks.append(now[0])
        now[0] += took_s
        return {"looks": len(looks)}

    paced = PacedLook(look, lambda: now[0])
    assert paced.seen() == {"looks": 1}
    now[0] = took_s + 0.99 * next_s
    assert paced.seen() == {"looks": 1}
    now[0] = took_s + 1.01 * next_s
    assert paced.seen() == {"looks": 2}


def test_a_slow_mesh_is_asked_at_once_when_something_has_happened() -> None:
    now, looks = [0.0], list[float]()

    def look() -> dict[str, Any]:
        looks.append(now[0])
        now[0] += 1.0
        return {"looks": len(looks)}

    paced = PacedLook(look, lambda: now[0])
    assert paced.seen("started") == {"looks": 1}
    now[0] = 2.4
    assert paced.seen("died") == {"looks": 1}  # 1.5 s after the last one at the earliest
    now[0] = 2.6
    assert paced.seen("died") == {"looks": 2}
    now[0] = 5.2
    assert paced.seen("died") == {"looks": 2}
    assert paced.seen("restarted") == {"looks": 3}


def test_a_run_without_a_status_has_no_mesh() -> None:
    def look() -> dict[str, Any]:
        raise RunUnavailable("run", "it has no status")

    assert PacedLook(look).seen() is None


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_a_sample_has_the_last_line_and_no_line_twice(tmp_path: Path, count: int) -> None:
    write_steps(tmp_path, 1, count)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10000, "cut')
    steps = [one["step"] for one in sampled_metrics(tmp_path / "metrics.jsonl", 20)]
    assert steps == sorted(set(steps))
    assert steps[-1:] == ([count] if count else [])
    assert min(count, 20) <= len(steps) or count in (0, 1, 5)
    assert steps[:1] == ([1] if count else [])


def test_columns_are_read_on_and_forget_steps_that_are_trained_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 4)
    columns = Columns(tmp_path)
    assert columns.read_on() == 4
    write_steps(tmp_path, 5, 6, extra=1.0)
    assert columns.read_on() == 6
    assert [math.isnan(one) for one in columns.column("extra")] == [True] * 4 + [False] * 2
    write_steps(tmp_path, 3, 3)
    assert columns.read_on() == 3
    assert list(columns.steps) == [1, 2, 3]
    assert columns.axis("tokens") == [10.0, 20.0, 30.0]
    assert columns.axis("time") == pytest.approx([2 / 3600, 4 / 3600, 6 / 3600])
    write_steps(tmp_path, 3, 4)
    assert columns.read_on() == 4
    assert list(columns.steps) == [1, 2, 3, 4]


def test_a_curve_has_few_points_and_keeps_its_mean() -> None:
    points = [(float(n), float(n % 2)) for n in range(10_000)]
    kept = reduced(points, 300)
    assert len(kept) == 300
    assert sum(y for _, y in kept) / 300 == pytest.approx(0.5, abs=0.01)
    assert kept[-1][0] == 9999.0


def test_smoothing_has_no_bias_at_the_start_and_leaves_out_what_is_not_there() -> None:
    smooth = curve("a", [1, 2, 3, 4], [2.0, math.nan, 2.0, 2.0], smoothing=0.9)
    assert list(smooth.ys) == pytest.approx([2.0, 2.0, 2.0])
    assert list(smooth.xs) == [1, 3, 4]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (-5, 12), (1, 1e9), (3.2, 3.21)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 * abs(high) for tick in found)


@pytest.mark.parametrize("ys", [[0.0], [0.0, 0.0], [1e-9, 2e-9], [5.0, 5.0], [-3.0, 1e6]])
def test_any_values_make_a_chart_that_says_what_it_shows(ys: list[float]) -> None:
    chart = Chart("Loss <b>", [curve("run <i>", range(len(ys)), ys)])
    page = Page(str(chart.svg()))
    (about,) = [one for tag, one in page.elements if tag == "svg" and one.get("role") == "img"]
    assert about["aria-label"].startswith("Loss <b> by optimizer step. run <i>: from")
    assert "nan" not in str(chart.svg())
    assert json.loads(chart.points())[0]["ys"]


def test_a_chart_without_points_says_so() -> None:
    assert "nothing yet" in Chart("Loss", [curve("a", [], [])]).svg()
    assert sparkline([1.0]) == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0341, "0.0341"), (1234, "1,234"), (60500, "60.5k"), (2.5e6, "2.5M"), (3, "3")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_lanes_count_what_overlaps_once_and_ignore_other_lines() -> None:
    busy = [["a", "play", 10.0, 12.0], ["a", "train", 11.0, 14.0], ["b", "pull", 9.0, 11.0]]
    busy += [["environment-0", "score", 12.0, 13.0], ["generator-0", "generate", 12.0, 13.0]]
    worked = {"a": 4.0, "b": 1.0, "environment-0": 0.5, "generator-0": 1.0, "x": "1", "y": -1}
    lines: list[dict[str, Any]] = [
        {"step": 1, "began": 10.0, "ended": 20.0, "worked": worked, "busy": [*busy, ["c", 1], "x"]},
        {"step": 2, "began": 20.0, "ended": 20.0, "worked": {"idle": 0}, "busy": []},
        {"step": "2"},
        {"step": 3, "began": float("nan"), "ended": 21.0, "worked": {}, "busy": []},
    ]
    found = timeline_of(lines)
    assert found is not None
    shares = {lane.actor: round(lane.busy, 3) for lane in found.lanes}
    assert shares == {"a": 0.4, "b": 0.1, "environment-0": 0.05, "generator-0": 0.1, "idle": 0.0}
    assert list(found.kinds) == ["rollout", "decode", "task", "train", "sync"]
    assert timeline_of([]) is None


def test_the_recent_median_is_that_of_the_last_steps_before_smoothing() -> None:
    ys = [100.0] * 50 + [1.0, math.nan, *([2.0] * (RECENT - 2)), 9.0]
    shown = Chart("Reward", [curve("a", range(len(ys)), ys, smoothing=0.9)], unit=" s")
    assert shown.median() == "median 2 s"
    assert Chart("Reward", [curve("a", [1], [1.0])]).median() == ""


def test_dollars_are_drawn_only_where_some_were_paid(tmp_path: Path) -> None:
    for name, usd in (("free", 0.0), ("paid", 0.25)):
        write_steps(tmp_path / name, 1, 3, **{"replay/usd_total": usd})
        columns = Columns(tmp_path / name)
        columns.read_on()
        titles = [chart.title for chart in charts_of_run(columns, [], "step", 0.0)]
        assert ("Dollars" in titles) == (name == "paid")


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ({"outcome": "failed", "step": "3"}, {"success": False, "step": 2}),
        ({"outcome": "<b>", "step": "-1", "group": "1e9", "min_reward": "nan"}, {}),
        (
            {"max_reward": "0.5", "error": "wrong_answer"},
            {"max_reward": 0.5, "error": "wrong_answer"},
        ),
    ],
)
def test_a_query_filters_rollouts_or_is_left_out(
    query: dict[str, str], asked: dict[str, Any]
) -> None:
    where = RolloutFilter.of(query).where()
    found = {name: getattr(where, name) for name in where.__slots__}
    assert {name: value for name, value in found.items() if value is not None} == asked


def test_a_query_of_charts_is_one_that_can_be_drawn() -> None:
    assert ChartOptions.of({"x": "tokens", "smooth": "0.9"}) == ChartOptions("tokens", 0.9)
    assert ChartOptions.of({"x": "<b>", "smooth": "1"}) == ChartOptions("step", 0.0)


def test_tokens_have_colours_by_their_own_figures() -> None:
    turn = a_trace().turns[0]  # log-probs -0.5 and -1.5, versions 6 and 7
    colours = {
        colouring: [one.colour for one in tokens_of(turn, colouring, None, 7, 0.5)]
        for colouring in ("logprob", "version", "advantage")
    }
    assert colours == {"logprob": ["u1", "u2"], "version": ["v1", "v0"], "advantage": ["p2", "p2"]}
    far = [one.colour for one in tokens_of(turn, "divergence", None, 7, None, [math.log(2), -0.1])]
    assert far == ["u8", "p1"]
    assert [one.colour for one in tokens_of(turn, "divergence", None, 7, None)] == ["u0", "u0"]
    assert advantage_of(a_trace("x"), 1, {"x": [0.1, 0.2]}) == 0.2
    assert advantage_of(a_trace("x"), 0, {}) is None


@pytest.fixture
async def run(tmp_path: Path, toolbox: ToolboxTask, build_config: Callable[..., Config]) -> Path:
    groups = [group_of(toolbox, number) for number in range(4)]
    await write_run(tmp_path / "run", build_config(), groups, steps=2)
    return tmp_path


async def test_rollouts_are_filtered_opened_and_linked_turn_by_turn(run: Path) -> None:
    _, app = dashboard(run)
    async with client(app) as browser:
        listed = Page((await browser.get("/runs/run/rollouts?group=1&sort=group")).text)
        links = [about["href"] for tag, about in listed.elements if "data-open" in about]
        assert links == [f"/runs/run/rollouts/train-000001-{n:03d}" for n in range(3)]
        one = (await browser.get(links[0])).text
        assert 'id="turn-0"' in one
        assert 'href="#turn-0"' in one
        beside = await browser.get("/runs/run/groups/1")
        assert beside.text.count('class="column"') == 3
        assert (await browser.get("/runs/run/groups/99")).status_code == 404
        assert (await browser.get("/runs/run/rollouts/99/9")).status_code == 404


async def test_the_advantage_of_a_token_is_that_of_its_rollout(run: Path) -> None:
    _, app = dashboard(run)
    async with client(app) as browser:
        answer = await browser.get("/runs/run/rollouts/1/0?colour=advantage")
        assert "advantage " in answer.text
        assert "no tokenizer" in answer.text or "·" in answer.text


async def test_the_divergence_of_a_token_is_what_its_step_has_stored(
    tmp_path: Path, toolbox: ToolboxTask, build_config: Callable[..., Config]
) -> None:
    run, groups = tmp_path, [group_of(toolbox, number) for number in range(4)]
    await write_run(run / "run", build_config(), groups, steps=1)
    with RunReader(run / "run") as reader:
        trace = next(one for one in reader.traces(0) if one.sample == 0)
    values = array("f", [0.25] * len(trace.turns[0].action_ids))
    with RunStore(run / "run", build_config()) as store:
        store.add_divergences(0, [TurnDivergences(trace.trace_id, 0, values)])
    _, app = dashboard(run)
    async with client(app) as browser:
        address = "/runs/run/rollouts/0/{}?colour=divergence"
        distilled = await browser.get(address.format(0))
        assert distilled.text.count("divergence 0.250") == len(values)
        assert "step 1 distilled no turn" in (await browser.get(address.format(1))).text
        untrained = await browser.get("/runs/run/rollouts/3/0?colour=divergence")
        assert "no step has trained this rollout" in untrained.text
        with closing(sqlite3.connect(run / "run" / "run.sqlite")) as rows, rows:
            rows.create_function("seal_of", -1, checksum_of)
            rows.execute("UPDATE divergences SET body = x'00'")
        assert "is damaged" in (await browser.get(address.format(0))).text


async def test_a_comparison_overlays_runs_and_names_their_differences(
    tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    for name, lr in (("a", 1e-3), ("b", 2e-3)):
        write_steps(tmp_path / name, 1, 5)
        (tmp_path / name / "config.toml").write_text(dump_toml(build_config(trainer={"lr": lr})))
    _, app = dashboard(tmp_path)
    async with client(app) as browser:
        page = Page((await browser.get("/compare?run=a&run=b&run=nothing&x=tokens")).text)
    points = [json.loads(about["data-points"]) for tag, about in page.elements if tag == "figure"]
    assert [one["label"] for one in points[0]] == ["a", "b"]
    assert points[0][0]["xs"] == [10, 20, 30, 40, 50]
    assert "trainer.lr" in page.text


async def test_pages_of_a_run_without_a_store_say_what_is_missing(tmp_path: Path) -> None:
    write_steps(tmp_path / "old", 1, 1)
    _, app = dashboard(tmp_path)
    async with client(app) as browser:
        answer = await browser.get("/runs/old/rollouts")
    assert answer.status_code == 404
    assert "has no run.sqlite" in answer.text


async def test_a_live_part_is_made_anew_only_when_its_files_have_changed(run: Path) -> None:
    asked: list[str] = []

    def html(name: str) -> str:
        asked.append(name)
        return name

    changes = PageChanges(parts_of_run(run / "run", ("timeline", "actors"), html))
    assert set(changes.look()) == {"timeline", "actors"}
    assert changes.look() == {}
    (run / "run" / "timeline.jsonl").write_text('{"step": 1}\n')
    assert changes.look() == {}  # read again, and the same
    assert asked == ["timeline", "actors", "timeline"]


def test_what_costs_more_the_longer_a_run_is_is_sent_more_seldom() -> None:
    now, cpu = [0.0], [0.0]

    def html(name: str) -> str:
        cpu[0] += 0.005  # five seconds of a thousandth of a core
        return f"{name} at {now[0]}"

    parts = PageParts(lambda: {"figures": now[0], "charts": now[0]}, html)
    changes = PageChanges(parts, lambda: now[0], lambda: cpu[0])
    sent = []
    for second in range(11):
        now[0] = float(second)
        sent.append(changes.look())
    assert all("figures" in one for one in sent)
    assert [second for second, one in enumerate(sent) if "charts" in one] == [0, 5, 10]


async def test_the_index_of_rollouts_has_totals_pages_and_errors_of_steps(run: Path) -> None:
    with RunReader(run / "run") as reader:
        rows = list(reader.rows())
        totals = reader.totals(Where(group_id=1))
        assert totals.count == len([row for row in rows if row.group_id == 1])
        assert totals.mean_reward == pytest.approx(
            sum(row.reward for row in rows if row.group_id == 1) / totals.count
        )
        kinds = [kind for row in rows for kind in row.error_kinds]
        assert reader.totals().errors == dict(Counter(kinds))
        assert list(reader.rows(limit=2, offset=3)) == rows[3:5]
        trained = [row for row in rows if row.group_id < 4]
        assert reader.errors_of_steps(0, 1)[""] == len(trained)
        assert reader.errors_of_steps(0, 0)[""] == len([r for r in trained if r.group_id < 2])
        pairs = [row.pair_id for row in reader.pairs()]
        assert [row.pair_id for row in reader.newest_pairs(2, 1)] == pairs[::-1][1:3]
        assert sum(reader.pair_states().values()) == len(pairs)


def test_labels_of_a_chart_are_text_and_never_markup() -> None:
    label = '"><script>alert(1)</script>'
    chart = Chart(label, [Curve(label, [0.0, 1.0], [1.0, 2.0])], x_title=label)
    assert "<script" not in chart.svg()
    assert "&lt;script" in chart.svg()


async def test_the_head_of_a_run_shows_the_newest_warning_of_each_kind(tmp_path: Path) -> None:
    write_steps(tmp_path / "run", 1, 2)
    lines = [
        {"time": n, "event": kind, "actor": "", "detail": f"<b>reason {n}</b>"}
        for n, kind in enumerate(["groups_flat", "actor_died", "teacher_failing", "groups_flat"])
    ]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (tmp_path / "run" / "events.jsonl").write_text(text)
    opened = OpenRun(tmp_path / "run")
    assert [one["time"] for one in opened.warnings()] == [3, 2]
    _, app = dashboard(tmp_path)
    async with client(app) as browser:
        page = Page((await browser.get("/runs/run/")).text)
    assert sum(about.get("class") == "warning" for _, about in page.elements) == 2
    assert [f"<b>reason {n}</b>" in page.text for n in range(4)] == [False, False, True, True]
    page.check_harmless()
