"""A run directory taken back to its newest checkpoint: what stays, what moves, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.actors.checkpoint_folder import STATE_FILE, folder_of
from composer_mesh.configs.agreement import AgreementConfig
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.report import Evaluation
from composer_mesh.services.resume import different_keys, refuse_unfit, rewind
from composer_mesh.services.run_directory import RunDirectoryError
from composer_mesh.services.run_store import RunStore

PROMPTS = 2


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config(run={"name": "unit", "seed": 3, "steps": 6})


def trace_of(group: int, sample: int = 0) -> Trace:
    turn = Turn([1, 2], [3], [-0.5], [0], "stop")
    messages = [{"role": "user", "content": "line\u2028end"}]
    name = f"train-{group}-{sample}"
    return Trace(name, group, sample, "toolbox", "train", group, [turn], messages, 1.0, True, [])


def pair_of(group: int) -> PreferencePair:
    said, name = assistant_message("Answer: 4", "call"), f"train-{group}-0"
    fixed = (0, [], [1], "Answer: 4", said, "", said, [2], 0, ["a", "b"], 2, 2, 0.1, True)
    return PreferencePair(f"pair-{group}", name, name, *fixed)


@contextmanager
def stored(root: Path, config: Config, steps: int, ahead: int = 1) -> Iterator[RunStore]:
    """A run of so many steps, with rollouts of one step more, that ended without a word."""
    with RunStore(root, config) as store:
        store.add_evaluation(Evaluation(0, 0.25, 4))
        for step in range(steps + ahead):
            for group in range(step * PROMPTS, (step + 1) * PROMPTS):
                store.add_traces([trace_of(group, sample) for sample in range(2)])
                store.add_pairs([pair_of(group)])
            if step < steps:
                store.add_step({"step": step + 1})
        yield store


def checkpoint(root: Path, step: int) -> None:
    folder_of(root, step).mkdir(parents=True)
    (folder_of(root, step) / STATE_FILE).touch()


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_what_came_after_the_checkpoint_moves_and_what_came_before_stays(
    tmp_path: Path, config: Config
) -> None:
    with stored(tmp_path, config, steps=5) as store:
        store.add_evaluation(Evaluation(4, 0.5, 4))
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 3)
    begun = rewind(tmp_path, config)
    assert begun.step == 3
    assert begun.evaluations == [Evaluation(0, 0.25, 4)]
    assert [one["step"] for one in objects(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    moved = objects(tmp_path / "metrics.jsonl.superseded-1")
    assert [one["step"] for one in moved] == [4, 5]
    groups = [one["group_id"] for one in objects(tmp_path / "traces" / "traces.jsonl")]
    assert groups == sorted([*range(3 * PROMPTS)] * 2)
    late = [one["group_id"] for one in objects(tmp_path / "traces/traces.jsonl.superseded-1")]
    assert late == sorted([*range(3 * PROMPTS, 6 * PROMPTS)] * 2)
    pairs = [one["pair_id"] for one in objects(tmp_path / "pairs" / "pairs.jsonl")]
    assert pairs == [f"pair-{group}" for group in range(3 * PROMPTS)]
    assert len(objects(tmp_path / "evaluations.jsonl.superseded-1")) == 1


def test_an_evaluation_of_the_checkpoint_itself_stays(tmp_path: Path, config: Config) -> None:
    with stored(tmp_path, config, steps=3) as store:
        store.add_evaluation(Evaluation(3, 0.5, 4))
    checkpoint(tmp_path, 3)
    assert [one.step for one in rewind(tmp_path, config).evaluations] == [0, 3]


def test_without_a_checkpoint_everything_begins_again_but_the_first_evaluation(
    tmp_path: Path, config: Config
) -> None:
    with stored(tmp_path, config, steps=2):
        pass
    begun = rewind(tmp_path, config)
    assert (begun.checkpoint, begun.step) == (None, 0)
    assert [one.step for one in begun.evaluations] == [0]
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert len(objects(tmp_path / "metrics.jsonl.superseded-1")) == 2


def test_a_last_line_that_was_cut_off_is_moved_too(tmp_path: Path, config: Config) -> None:
    with stored(tmp_path, config, steps=1, ahead=0):
        pass
    checkpoint(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "loss')
    rewind(tmp_path, config)
    assert objects(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert (tmp_path / "metrics.jsonl.superseded-1").read_bytes() == b'{"step": 2, "loss\n'


def test_each_resume_moves_to_files_of_its_own(tmp_path: Path, config: Config) -> None:
    checkpoint(tmp_path, 1)
    for number in (1, 2):
        with stored(tmp_path, config, steps=2, ahead=0):
            pass
        rewind(tmp_path, config)
        assert (tmp_path / f"metrics.jsonl.superseded-{number}").exists()


def test_nothing_is_moved_where_nothing_came_after_the_checkpoint(
    tmp_path: Path, config: Config
) -> None:
    with stored(tmp_path, config, steps=2, ahead=0):
        pass
    checkpoint(tmp_path, 2)
    rewind(tmp_path, config)
    assert list(tmp_path.glob("**/*.superseded-*")) == []


def test_late_pairs_wait_again_but_not_those_of_rollouts_that_are_sampled_again(
    tmp_path: Path, config: Config
) -> None:
    with stored(tmp_path, config, steps=3, ahead=0):
        pass
    with closing(LateStore(tmp_path / LATE_FILE)) as late:
        late.add_pairs([pair_of(group) for group in range(3 * PROMPTS)])
        late.take_pairs(0, 100, 1)
        late.take_pairs(2, 100, 100)
    checkpoint(tmp_path, 2)
    rewind(tmp_path, config)
    with closing(LateStore(tmp_path / LATE_FILE)) as late:
        waiting, _ = late.take_pairs(2, 100, 100)
        fresh = late.add_pairs([pair_of(group) for group in range(3 * PROMPTS)])
    assert [pair.pair_id for pair in waiting] == ["pair-1", "pair-2", "pair-3"]
    assert [pair.pair_id for pair in fresh] == ["pair-4", "pair-5"]


def test_the_groups_that_late_rewards_may_still_correct_are_read_back(
    tmp_path: Path, build_config: Any
) -> None:
    config = build_config(run={"name": "unit", "seed": 3, "steps": 6}, late_rewards={"max_age": 2})
    with stored(tmp_path, config, steps=4):
        pass
    checkpoint(tmp_path, 4)
    groups = rewind(tmp_path, config).groups
    assert list(groups) == [2, 3]
    assert groups[3] == [[trace_of(group, sample) for sample in range(2)] for group in (6, 7)]


def test_another_config_is_refused_with_the_keys_that_differ(
    tmp_path: Path, config: Config, build_config: Any
) -> None:
    with stored(tmp_path, config, steps=1):
        pass
    other = build_config(
        run={"name": "unit", "seed": 4, "steps": 6}, schedule={"prompts_per_step": 3}
    )
    with pytest.raises(RunDirectoryError) as refused:
        refuse_unfit(tmp_path, other)
    assert "other values of run.seed, schedule.prompts_per_step" in str(refused.value)
    refuse_unfit(tmp_path, config)


def test_a_run_may_go_on_with_other_bounds_of_its_alarms(
    tmp_path: Path, config: Config, build_config: Any
) -> None:
    with stored(tmp_path, config, steps=1):
        pass
    same = config.model_dump(exclude={"agreement"})
    refuse_unfit(tmp_path, Config(**same, agreement=AgreementConfig(alarm_mean=0.7)))


def test_a_directory_without_a_run_is_refused(tmp_path: Path, config: Config) -> None:
    with pytest.raises(RunDirectoryError, match="holds no run"):
        refuse_unfit(tmp_path, config)


def test_a_run_that_came_to_its_end_is_refused(tmp_path: Path, config: Config) -> None:
    with stored(tmp_path, config, steps=6, ahead=0) as store:
        store.add_evaluation(Evaluation(6, 1.0, 4))
    with pytest.raises(RunDirectoryError, match="has trained all its 6 steps"):
        refuse_unfit(tmp_path, config)


def test_keys_are_named_where_they_differ_and_nowhere_else() -> None:
    one = {"a": {"b": 1, "c": [1]}, "d": {"kind": "x", "only": 1}}
    other = {"a": {"b": 1, "c": [2]}, "d": {"kind": "y"}}
    assert different_keys(one, other) == ["a.c", "d.kind", "d.only"]
    assert different_keys(one, one) == []
