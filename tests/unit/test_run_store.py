"""The run store: what a call was given is on disk when it returns, one object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Trace, Turn, trace_from_json
from composer_mesh.services.report import Evaluation, read_evaluations
from composer_mesh.services.run_store import RunStore


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config()


def trace_of(name: str) -> Trace:
    turn = Turn([1, 2], [3], [-0.5], [0], "stop")
    messages = [{"role": "user", "content": "line\nend \u2028 ü"}]
    return Trace(name, 0, 0, "toolbox", "train", 0, [turn], messages, 1.0, True, [])


def pair_of(name: str) -> PreferencePair:
    said = assistant_message("Answer: 4", "call")
    return PreferencePair(
        name,
        name,
        "t",
        0,
        [],
        [1],
        "Answer: 4",
        said,
        "",
        said,
        [2],
        0,
        ["a", "b"],
        2,
        2,
        0.1,
        True,
    )


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_traces_are_on_disk_when_the_call_returns(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "run" / "traces" / "traces.jsonl"
    with RunStore(tmp_path / "run", config) as store:
        store.add_traces([trace_of("a"), trace_of("b")])
        assert [trace_from_json(line).trace_id for line in lines(path)] == ["a", "b"]
        store.add_traces([trace_of("c")])
        assert [trace_from_json(line) for line in lines(path)] == [trace_of(n) for n in "abc"]


def test_pairs_steps_and_events_are_on_disk_when_the_calls_return(
    tmp_path: Path, config: Config
) -> None:
    with RunStore(tmp_path, config) as store:
        store.add_pairs([pair_of("p")])
        assert pair_from_json(lines(tmp_path / "pairs" / "pairs.jsonl")[0]) == pair_of("p")
        store.add_step({"step": 1, "loss/sdpo": None})
        assert json.loads(lines(tmp_path / "metrics.jsonl")[0]) == {"step": 1, "loss/sdpo": None}
        store.add_event("actor_died", "generator-0", "killed")
        event = json.loads(lines(tmp_path / "events.jsonl")[0])
        assert event.pop("time") > 0
        assert event == {"event": "actor_died", "actor": "generator-0", "detail": "killed"}


def test_evaluations_are_on_disk_when_the_call_returns_and_read_back(
    tmp_path: Path, config: Config
) -> None:
    made = [Evaluation(0, 0.25, 8), Evaluation(7, 1 / 3, 9)]
    with RunStore(tmp_path, config) as store:
        for number, evaluation in enumerate(made, 1):
            store.add_evaluation(evaluation)
            assert read_evaluations(tmp_path / "evaluations.jsonl") == made[:number]


def test_nothing_to_add_makes_no_file(tmp_path: Path, config: Config) -> None:
    with RunStore(tmp_path, config) as store:
        store.add_traces([])
        store.add_pairs([])
    assert not (tmp_path / "traces" / "traces.jsonl").exists()
    assert not (tmp_path / "pairs" / "pairs.jsonl").exists()


def test_a_store_opened_again_keeps_what_was_there(tmp_path: Path, config: Config) -> None:
    for step in (1, 2):
        with RunStore(tmp_path, config) as store:
            store.add_step({"step": step})
    assert [json.loads(line)["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_refused_and_leaves_no_line(
    tmp_path: Path, config: Config, value: float
) -> None:
    with RunStore(tmp_path, config) as store:
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.add_step({"step": 1, "loss/total": value})
        store.add_step({"step": 2})
    assert [json.loads(line)["step"] for line in lines(tmp_path / "metrics.jsonl")] == [2]


def test_the_resolved_config_in_the_directory_is_the_runs_own(
    tmp_path: Path, config: Config
) -> None:
    with RunStore(tmp_path, config):
        assert load_config(tmp_path / "config.toml") == config
