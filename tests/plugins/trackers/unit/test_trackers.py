"""Trackers hear of what a run does, and can neither hold it up nor end it.

docs/trackers.md says so too. Stand-ins take the place of two trackers' packages here;
`nox -s trackers` does the same with the packages themselves.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import queue
import re
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
from guides import Guide

from composer_mesh.configs.changes import changes
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, resolve_config
from composer_mesh.configs.schema import Config
from composer_mesh.configs.tracking import (
    PrometheusTracking,
    TrackerSection,
    TrackingConfig,
    WandbTracking,
)
from composer_mesh.services.checks.accepting import check_run_trackers
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.run.tracking import RunTrackers, TrackedView
from composer_mesh.services.trackers.delivery import MOST_FAILURES, NAMES, Delivery, Names, name_of
from composer_mesh.services.trackers.port import (
    TrackedRun,
    TrackedStep,
    TrackerRefused,
    check_trackers,
)

RUN = TrackedRun("unit", Path("nowhere"), {})
LONG_S = 60.0
TABLE = {"run": {"name": "unit", "steps": 1}, "data": {"task": "toolbox"}}


class FakeTracker:
    """Keeps what it is told; `at_log` runs in each `log`."""

    def __init__(self, at_log: Callable[[TrackedStep], None] = lambda step: None) -> None:
        self.logged: list[int] = []
        self.states: list[str] = []
        self._at_log = at_log

    def start(self, run: TrackedRun) -> str:
        return run.name

    def log(self, step: TrackedStep) -> None:
        self._at_log(step)
        self.logged.append(step.step)

    def finish(self, state: str) -> None:
        self.states.append(state)


class Told:
    """What deliveries tell, in order; `next` waits for it."""

    def __init__(self) -> None:
        self._said: queue.Queue[tuple[str, str]] = queue.Queue()

    def __call__(self, kind: str, text: str) -> None:
        self._said.put((kind, text))

    def next(self) -> tuple[str, str]:
        return self._said.get(timeout=LONG_S)

    def rest(self) -> list[str]:
        return [self._said.get()[0] for _ in range(self._said.qsize())]


def step_of(number: int) -> TrackedStep:
    return TrackedStep(number, 0.0, {"train/reward": 0.5})


@contextmanager
def held() -> Iterator[threading.Event]:
    """An event that a blocked tracker waits for, set at the end so that its thread ends."""
    free = threading.Event()
    try:
        yield free
    finally:
        free.set()


def test_a_tracker_gets_every_step_in_order_and_the_end() -> None:
    tracker, told = FakeTracker(), Told()
    delivery = Delivery(lambda: tracker, RUN, 10, told)
    for number in range(5):
        delivery.offer(step_of(number))
    delivery.close("finished", LONG_S)
    assert (tracker.logged, tracker.states) == ([0, 1, 2, 3, 4], ["finished"])
    assert told.rest() == ["tracker_started"]


def test_a_tracker_that_blocks_takes_no_time_of_the_run_and_is_left_behind() -> None:
    told = Told()
    with held() as free:
        delivery = Delivery(lambda: FakeTracker(lambda _: free.wait() and None), RUN, 2, told)
        assert told.next()[0] == "tracker_started"
        for number in range(1000):
            delivery.offer(step_of(number))  # a call that waited would never return
        delivery.close("finished", 0.01)
    assert told.rest() == ["tracker_slow", "tracker_left_behind"]


def test_steps_that_a_slow_tracker_has_not_taken_are_left_out_and_counted() -> None:
    told, begun = Told(), threading.Event()
    with held() as free:

        def wait(_: TrackedStep) -> None:
            begun.set()
            free.wait(LONG_S)

        tracker = FakeTracker(wait)
        delivery = Delivery(lambda: tracker, RUN, 1, told)
        delivery.offer(step_of(0))
        assert begun.wait(LONG_S)
        for number in range(1, 5):
            delivery.offer(step_of(number))
        free.set()
        delivery.close("finished", LONG_S)
    assert tracker.logged == [0, 1]
    assert told.rest() == ["tracker_started", "tracker_slow", "tracker_incomplete"]


def test_a_failure_is_told_once_and_later_steps_are_tried() -> None:
    def fail_at_first(step: TrackedStep) -> None:
        if step.step < 3:
            raise OSError("no route")

    tracker, told = FakeTracker(fail_at_first), Told()
    delivery = Delivery(lambda: tracker, RUN, 10, told)
    for number in range(5):
        delivery.offer(step_of(number))
    delivery.close("stopped", LONG_S)
    assert (tracker.logged, tracker.states) == ([3, 4], ["stopped"])
    assert [told.next(), told.next()] == [
        ("tracker_started", "unit"),
        ("tracker_failed", "OSError: no route; later steps are tried"),
    ]
    assert told.rest() == []


def test_a_tracker_that_always_fails_is_given_up() -> None:
    def fail(step: TrackedStep) -> None:
        raise ValueError(f"step {step.step}")

    tracker, told = FakeTracker(fail), Told()
    delivery = Delivery(lambda: tracker, RUN, 100, told)
    for number in range(MOST_FAILURES + 5):
        delivery.offer(step_of(number))
    assert [told.next()[0] for _ in range(3)] == [
        "tracker_started",
        "tracker_failed",
        "tracker_given_up",
    ]
    delivery.close("finished", LONG_S)  # returns at once, since nothing is left to wait for
    assert (tracker.states, told.rest()) == ([], [])


def test_failures_that_do_not_follow_each_other_do_not_give_a_tracker_up() -> None:
    def fail_at_even_steps(step: TrackedStep) -> None:
        if step.step % 2 == 0:
            raise OSError("no route")

    tracker, steps = FakeTracker(fail_at_even_steps), range(4 * MOST_FAILURES)
    delivery = Delivery(lambda: tracker, RUN, len(steps) + 1, Told())
    for number in steps:
        delivery.offer(step_of(number))
    delivery.close("finished", LONG_S)
    assert (tracker.logged, tracker.states) == (list(steps[1::2]), ["finished"])


def test_a_tracker_that_cannot_be_made_is_given_up() -> None:
    def make() -> FakeTracker:
        raise ModuleNotFoundError("No module named 'wandb'")

    told = Told()
    delivery = Delivery(make, RUN, 1, told)
    kind, text = told.next()
    assert (kind, "No module named 'wandb'" in text) == ("tracker_given_up", True)
    delivery.close("failed", LONG_S)


def test_values_are_finite_numbers_under_the_names_of_the_field() -> None:
    names = Names(trained_tokens=100)
    metrics = {
        "step": 3,
        "loss/total": 0.5,
        "loss/replay": None,
        "policy/grad_norm": float("inf"),
        "reward/of/solved": 0.25,
        "tokens/trained": 20,
        "time/step_s": 2.0,
        "sdpo/refused": True,
    }
    assert names.of_step(metrics) == {
        "train/loss": 0.5,
        "train/rewards/solved/mean": 0.25,
        "tokens/trained": 20.0,
        "train/step_time": 2.0,
        "train/num_tokens": 120.0,
        "perf/tokens_per_s": 10.0,
    }


def test_no_two_metrics_have_one_name_in_a_tracker() -> None:
    assert len(set(NAMES.values())) == len(NAMES)
    assert not set(NAMES) & set(NAMES.values())
    assert name_of("lag/max") == "lag/max"


def config_of(*trackers: dict[str, Any]) -> Config:
    return resolve_config({**TABLE, "tracking": list(trackers)}, [], "unit")


def test_tables_of_trackers_are_kept_in_the_resolved_config() -> None:
    config = config_of({"type": "tensorboard"}, {"type": "wandb", "mode": "offline"})
    again = resolve_config(tomllib.loads(dump_toml(config)), [], "unit")
    assert again == config
    assert [one.title for one in config.tracking] == ["tensorboard", "wandb"]


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ([{"type": "wandb"}, {"type": "wandb"}], "two tables of tracking have the name 'wandb'"),
        ([{"type": "prometheus", "host": "0.0.0.0"}], "token_env is not set"),
        ([{"type": "excel"}], "type must be one of"),
        ([{"type": "wandb", "mode": "sometimes"}], "mode"),
        ([{"type": "mlflow", "uri": "https://name:secret@host"}], "uri"),
    ],
)
def test_a_table_that_cannot_work_is_refused(tables: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_of(*tables)


def test_a_missing_package_is_refused_with_the_name_of_the_extra() -> None:
    config = config_of({"type": "tensorboard"})
    with pytest.raises(TrackerRefused, match=r"composer-mesh\[tensorboard\]"):
        check_trackers([config.tracking[0].model_copy(update={"type": "tensorboard"})])


def test_a_custom_tracker_that_is_not_there_is_refused() -> None:
    with pytest.raises(TrackerRefused, match="no_such_module"):
        check_run_trackers(config_of({"type": "custom", "import_path": "no_such_module:Mine"}))


class FakeView:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def update(self, step: Any) -> None:
        self.seen.append("update")

    def evaluation(self, evaluation: Evaluation) -> None:
        self.seen.append("evaluation")

    def phase(self, text: str) -> None:
        self.seen.append(text)


async def test_a_run_passes_its_figures_to_trackers_and_records_what_they_tell(
    tmp_path: Path,
) -> None:
    events: list[tuple[str, str, str]] = []
    steps: list[TrackedStep] = []
    config = config_of({"type": "custom", "import_path": "a:b", "name": "mine"})
    trackers = RunTrackers(
        config,
        tmp_path,
        lambda kind, actor, detail, **fields: events.append((kind, actor, detail)),
        lambda section: FakeTracker(steps.append),
    )
    await trackers.start(lambda: [{"tokens/trained": 30}])
    view = FakeView()
    both = TrackedView(view, trackers)
    both.phase("training")
    both.evaluation(Evaluation(0, 0.5, 8))
    both.update({"step": 1, "tokens/trained": 12, "reward/mean": 0.5})
    await trackers.close("finished")
    await asyncio.sleep(0)  # what the threads have told is recorded in the loop
    assert view.seen == ["training", "evaluation", "update"]
    assert [one.step for one in steps] == [0, 1]
    assert steps[0].values["eval/success_rate"] == 0.5
    assert steps[1].values["train/num_tokens"] == 42.0
    assert events == [("tracker_started", "mine", "unit")]


def test_a_resumed_run_may_have_other_trackers() -> None:
    before, after = config_of({"type": "wandb"}), config_of({"type": "tensorboard", "queue": 5})
    assert all(change.safe for change in changes(before, after))
    assert all(change.safe for change in changes(before, config_of()))
    assert list(changes(before, after))


PAGE = Guide.read("trackers.md")


SECTIONS = {
    get_args(member)[1].tag: get_args(member)[0] for member in get_args(get_args(TrackingConfig)[0])
}


def test_the_table_of_names_is_that_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `([\w/]+)` \| `([\w/]+)` \|$", PAGE.text, re.MULTILINE))
    rows.pop("reward/of/NAME")
    assert rows == NAMES


def test_each_type_of_tracker_is_on_the_page_with_its_own_keys() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (`[^|]+) \|$", PAGE.text, re.MULTILINE))
    shared = set(TrackerSection.model_fields)
    assert {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in rows.items()} == {
        name: set(section.model_fields) - shared for name, section in SECTIONS.items()
    }


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    fields = TrackerSection.model_fields
    assert f"`queue` steps ({fields['queue'].default:,})" in PAGE.text
    assert f"`finish_s` seconds ({fields['finish_s'].default:g})" in PAGE.text
    assert f"fails {MOST_FAILURES} times in a row" in PAGE.text


def test_the_tracker_of_the_page_writes_its_lines(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.text, re.DOTALL)
    exec(compile(code, "docs/trackers.md", "exec"), names)
    tracker = names["LinesTracker"]()
    assert tracker.start(TrackedRun("unit", tmp_path / "own", {})) == str(tmp_path / "own")
    tracker.log(TrackedStep(1, 0.0, {"train/reward": 0.5}))
    tracker.finish("finished")
    line = json.loads((tmp_path / "own" / "lines.jsonl").read_text())
    assert line == {"step": 1, "train/reward": 0.5}


PACKAGE = "composer_mesh.plugins.trackers"


@pytest.fixture
def tracker_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tracker's module, imported with stand-ins for what it imports."""
    imported: list[str] = []

    def load(module: str, **packages: ModuleType) -> Any:
        for name, package in packages.items():
            monkeypatch.setitem(sys.modules, name.replace("__", "."), package)
        imported.append(f"{PACKAGE}.{module}")
        monkeypatch.delitem(sys.modules, imported[-1], raising=False)
        return importlib.import_module(imported[-1])

    yield load
    for name in imported:
        sys.modules.pop(name, None)


def stand_in(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def test_a_resumed_run_has_its_earlier_id_in_wandb(tracker_of: Any, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(url="https://example.invalid/run")

    wandb = stand_in("wandb", init=init, Settings=lambda **_: None)
    module = tracker_of("experiments", wandb=wandb)
    for folder in ("one", "one", "other"):
        module.WandbTracker(WandbTracking(type="wandb")).start(
            TrackedRun("unit", tmp_path / folder, {})
        )
    first, resumed, other = (one["id"] for one in asked)
    assert first == resumed
    assert first != other
    assert {one["resume"] for one in asked} == {"allow"}


class _Gauge:
    def __init__(self, name: str, _title: str, _labels: list[str], registry: dict[str, float]):
        self._name, self._registry = name, registry

    def labels(self, **_: str) -> _Gauge:
        return self

    def set(self, value: float) -> None:
        self._registry[self._name] = value


def test_figures_are_served_to_who_brings_the_token_alone(
    tracker_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = (lambda registry: repr(dict(registry)).encode()), "text/plain"
    exposition = stand_in("prometheus_client.exposition", choose_encoder=lambda _: encode)
    client = stand_in("prometheus_client", CollectorRegistry=dict, Gauge=_Gauge)
    module = tracker_of(
        "to_prometheus", prometheus_client=client, prometheus_client__exposition=exposition
    )
    monkeypatch.setenv("UNIT_TOKEN", "right")
    section = PrometheusTracking(type="prometheus", port=0, token_env="UNIT_TOKEN")
    tracker = module.PrometheusTracker(section)
    url = tracker.start(TrackedRun("unit", tmp_path, {}))
    try:
        tracker.log(TrackedStep(3, 0.0, {"reward": 0.5}))
        assert _status(url, "Bearer right") == 200
        for header in (None, "", "Bearer wrong", "right"):
            assert _status(url, header) == 401
    finally:
        tracker.finish("finished")


def _status(url: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
