"""Rewards after training: they join by trace, train the difference once, and outlive a restart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import Trace, Turn, trace_to_json
from composer_mesh.services.advantages import make_advantages
from composer_mesh.services.replay.late_rewards import LateRewards
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.replay.post_reward import LateRewardError, post_reward

MAX_AGE = 3


def trace_of(group: int, sample: int, reward: float) -> Trace:
    turn = Turn([1, 2], [3, 4], [-1.0, -2.0], [group, group], "stop")
    name = f"train-{group:06d}-{sample:03d}"
    return Trace(name, group, sample, "toolbox", "train", 0, [turn], [], reward, False, [])


def group_of(group: int, *rewards: float) -> list[Trace]:
    return [trace_of(group, sample, reward) for sample, reward in enumerate(rewards)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LateStore]:
    with closing(LateStore(tmp_path / LATE_FILE)) as store:
        yield store


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config(advantage={"scale": "none"}, late_rewards={"max_age": MAX_AGE})


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def late(store: LateStore, config: Config, reports: list[str]) -> LateRewards:
    return LateRewards(store, make_advantages(config.advantage), MAX_AGE, reports.append)


def learned(late: LateRewards, step: int) -> dict[str, float]:
    return {s.trace_id: s.advantage for s in late.corrections(step).samples}


def test_a_late_reward_trains_what_the_first_pass_lacked(
    store: LateStore, late: LateRewards
) -> None:
    late.remember(0, [group_of(0, 1.0, 0.0), group_of(1, 1.0, 0.0)])
    store.post_reward("train-000000-001", 1.0, "a user")
    found = late.corrections(1)
    changes = {sample.trace_id: sample.advantage for sample in found.samples}
    assert changes == {
        "train-000000-000": pytest.approx(-0.5),
        "train-000000-001": pytest.approx(0.5),
    }
    assert found.counts == {"rewards": 1}
    assert found.samples[0].logprobs == [0.0, 0.0, -1.0, -2.0]
    assert late.corrections(2).samples == []


def test_advantages_and_their_corrections_add_up_to_those_of_the_last_rewards(
    store: LateStore, late: LateRewards, config: Config, rng: random.Random
) -> None:
    advantages = make_advantages(config.advantage)
    groups = [group_of(n, *(rng.random() for _ in range(4))) for n in range(3)]
    last = {trace.trace_id: trace.reward for group in groups for trace in group}
    sums = dict(zip(last, (a for row in advantages(groups) for a in row), strict=True))
    late.remember(0, groups)
    for step in range(1, 1 + MAX_AGE):
        for trace_id in rng.sample(sorted(last), 5):
            last[trace_id] = rng.random()
            store.post_reward(trace_id, last[trace_id], "")
        for trace_id, change in learned(late, step).items():
            sums[trace_id] += change
    final = [[replace(t, reward=last[t.trace_id]) for t in group] for group in groups]
    expected = [advantage for row in advantages(final) for advantage in row]
    assert list(sums.values()) == pytest.approx(expected, abs=1e-5)


def test_the_last_of_several_rewards_for_a_rollout_counts(
    store: LateStore, late: LateRewards
) -> None:
    late.remember(0, [group_of(0, 0.0, 0.0)])
    for reward in (0.2, 0.8, 1.0):
        store.post_reward("train-000000-000", reward, "")
    assert learned(late, 1)["train-000000-000"] == pytest.approx(0.5)
    assert store.rewards() == []


def test_a_reward_that_comes_before_training_takes_the_place_of_the_first_one(
    store: LateStore, late: LateRewards
) -> None:
    store.post_reward("train-000000-001", 0.75, "")
    assert late.corrections(0).samples == []
    (group,) = late.on_time([group_of(0, 1.0, 0.0)], 0)
    assert [trace.reward for trace in group] == [1.0, 0.75]
    late.remember(0, [group])
    assert late.corrections(1).samples == []


def test_a_reward_that_is_too_late_expires_and_is_told(
    store: LateStore, late: LateRewards, reports: list[str]
) -> None:
    late.remember(0, [group_of(0, 0.0, 1.0)])
    store.post_reward("train-000000-000", 1.0, "")
    counts = [late.corrections(step).counts for step in range(MAX_AGE + 1, 2 * MAX_AGE + 3)]
    assert [count["expired"] for count in counts] == [0] * (MAX_AGE + 1) + [1]
    assert "waited more than 3 steps" in reports[0]
    assert store.rewards() == []


def test_a_waiting_reward_survives_a_restart(
    tmp_path: Path, store: LateStore, late: LateRewards, config: Config
) -> None:
    groups = [group_of(0, 1.0, 0.0)]
    late.remember(0, groups)
    store.post_reward("train-000000-001", 1.0, "")
    store.close()
    with closing(LateStore(tmp_path / LATE_FILE)) as opened:
        again = LateRewards(opened, make_advantages(config.advantage), MAX_AGE, print)
        again.remember(0, groups)
        assert len(again.corrections(1).samples) == 2


def test_a_step_that_is_trained_again_gets_its_rewards_again(
    store: LateStore, late: LateRewards
) -> None:
    groups = [group_of(0, 1.0, 0.0)]
    late.remember(0, groups)
    store.post_reward("train-000000-001", 1.0, "")
    once = learned(late, 2)
    store.rewind(2)
    late.remember(0, groups)
    assert learned(late, 2) == once


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    root = tmp_path / "run"
    (root / "traces").mkdir(parents=True)
    (root / "config.toml").write_text(dump_toml(config))
    lines = [trace_to_json(trace) + b"\n" for trace in group_of(0, 1.0, 0.0)]
    (root / "traces" / "traces.jsonl").write_bytes(b"".join(lines))
    return root


def test_a_posted_reward_is_there_for_the_run(run: Path) -> None:
    post_reward(run, "train-000000-001", 0.5, "a person")
    with closing(LateStore(run / LATE_FILE)) as store:
        (reward,) = store.rewards()
    assert (reward.trace_id, reward.reward) == ("train-000000-001", 0.5)
    assert reward.source == "a person"


def test_a_reward_that_no_run_can_use_is_refused(run: Path, build_config: Any) -> None:
    with pytest.raises(LateRewardError, match="has no rollout 'train-000000-009'"):
        post_reward(run, "train-000000-009", 0.5)
    with pytest.raises(LateRewardError, match="the reward is nan but must be finite"):
        post_reward(run, "train-000000-001", float("nan"))
    with pytest.raises(LateRewardError, match="is no run directory"):
        post_reward(run / "traces", "train-000000-001", 0.5)
    (run / "config.toml").write_text(dump_toml(build_config()))
    with pytest.raises(LateRewardError, match=r"late_rewards\.max_age is 0"):
        post_reward(run, "train-000000-001", 0.5)
    assert not (run / LATE_FILE).exists()
