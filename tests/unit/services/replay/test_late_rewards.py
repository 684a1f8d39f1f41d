"""Rewards after training: they join by trace, train the difference once, and outlive a restart."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.replay.late_rewards import Corrections, LateRewards
from composer_mesh.services.replay.post_reward import LateRewardError, post_reward, read_posts
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import ItemState, LateReward
from composer_mesh.services.store.writing import RunStore

MAX_AGE = 3


def trace_of(group: int, sample: int, reward: float) -> Trace:
    turn = Turn([1, 2], [3, 4], [-1.0, -2.0], [group, group], "stop")
    name = f"train-{group:06d}-{sample:03d}"
    return Trace(name, group, sample, "toolbox", "train", 0, [turn], [], reward, False, [])


def group_of(group: int, *rewards: float) -> list[Trace]:
    return [trace_of(group, sample, reward) for sample, reward in enumerate(rewards)]


@dataclass
class Posted:
    """Posted rewards as a store tells them: those that no planned step has settled."""

    waiting: list[LateReward] = field(default_factory=list)
    settled: list[tuple[str, float, ItemState]] = field(default_factory=list)

    def post_reward(self, trace_id: str, reward: float, source: str = "") -> None:
        place = len(self.waiting) + len(self.settled)
        self.waiting.append(LateReward(place, trace_id, reward, source))

    def plan(self, found: Corrections) -> None:
        """What planning a step does."""
        for reward, state in found.settled:
            self.waiting.remove(reward)
            self.settled.append((reward.trace_id, reward.reward, state))


@pytest.fixture
def store() -> Posted:
    return Posted()


@pytest.fixture
def config(build_config: Any) -> Config:
    return build_config(advantage={"scale": "none"}, late_rewards={"max_age": MAX_AGE})


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def late(store: Posted, config: Config, reports: list[str]) -> LateRewards:
    return late_of(store, config, reports)


def late_of(store: Posted, config: Config, reports: list[str] | None = None) -> LateRewards:
    told = reports if reports is not None else []
    advantages = make_advantages(config.advantage)
    return LateRewards(lambda: list(store.waiting), advantages, MAX_AGE, told.append)


def planned(store: Posted, late: LateRewards, step: int) -> Corrections:
    found = late.corrections(step)
    store.plan(found)
    return found


def learned(store: Posted, late: LateRewards, step: int) -> dict[str, float]:
    return {s.trace_id: s.advantage for s in planned(store, late, step).samples}


def test_a_late_reward_trains_what_the_first_pass_lacked(store: Posted, late: LateRewards) -> None:
    late.remember(0, [group_of(0, 1.0, 0.0), group_of(1, 1.0, 0.0)])
    store.post_reward("train-000000-001", 1.0, "a user")
    found = planned(store, late, 1)
    changes = {sample.trace_id: sample.advantage for sample in found.samples}
    assert changes == {
        "train-000000-000": pytest.approx(-0.5),
        "train-000000-001": pytest.approx(0.5),
    }
    assert found.counts == {"rewards": 1}
    assert found.samples[0].logprobs == [0.0, 0.0, -1.0, -2.0]
    assert planned(store, late, 2).samples == []


def test_a_late_reward_is_compared_among_trajectories_of_its_role_without_their_own_advantage(
    store: Posted, late: LateRewards
) -> None:
    first, second, third = (replace(one, role="first") for one in group_of(0, 1.0, 0.0, 5.0))
    other = replace(first, trace_id=f"{first.trace_id}.1", role="second", reward=9.0)
    alone = replace(third, advantage=2.0)
    late.remember(0, [[replace(first, others=[other]), second, alone]])
    store.post_reward(second.trace_id, 1.0, "")
    store.post_reward(alone.trace_id, 0.0, "")
    assert learned(store, late, 1) == {
        first.trace_id: pytest.approx(-0.5),
        second.trace_id: pytest.approx(0.5),
    }


def test_advantages_and_their_corrections_add_up_to_those_of_the_last_rewards(
    store: Posted, late: LateRewards, config: Config, rng: random.Random
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
        for trace_id, change in learned(store, late, step).items():
            sums[trace_id] += change
    final = [[replace(t, reward=last[t.trace_id]) for t in group] for group in groups]
    expected = [advantage for row in advantages(final) for advantage in row]
    assert list(sums.values()) == pytest.approx(expected, abs=1e-5)


def test_the_last_of_several_rewards_for_a_rollout_counts(store: Posted, late: LateRewards) -> None:
    late.remember(0, [group_of(0, 0.0, 0.0)])
    for reward in (0.2, 0.8, 1.0):
        store.post_reward("train-000000-000", reward, "")
    assert learned(store, late, 1)["train-000000-000"] == pytest.approx(0.5)
    assert store.waiting == []


def test_a_reward_that_comes_before_training_takes_the_place_of_the_first_one(
    store: Posted, late: LateRewards
) -> None:
    store.post_reward("train-000000-001", 0.75, "")
    found = late.corrections(0)
    (group,) = late.on_time([group_of(0, 1.0, 0.0)], found)
    store.plan(found)
    assert found.samples == []
    assert [trace.reward for trace in group] == [1.0, 0.75]
    assert store.settled == [("train-000000-001", 0.75, ItemState.TRAINED)]
    late.remember(0, [group])
    assert planned(store, late, 1).samples == []


def test_a_reward_that_is_too_late_expires_and_is_told(
    store: Posted, late: LateRewards, reports: list[str]
) -> None:
    late.remember(0, [group_of(0, 0.0, 1.0)])
    store.post_reward("train-000000-000", 1.0, "")
    counts = [planned(store, late, step).counts for step in range(MAX_AGE + 1, 2 * MAX_AGE + 3)]
    assert [count["expired"] for count in counts] == [0] * (MAX_AGE + 1) + [1]
    assert "waited more than 3 steps" in reports[0]
    assert store.waiting == []


def test_after_a_restart_a_reward_corrects_what_earlier_rewards_had_made(
    store: Posted, late: LateRewards, config: Config
) -> None:
    """The correction is the difference to what was trained, the corrections before included."""
    groups = [group_of(0, 1.0, 0.0)]
    late.remember(0, groups)
    store.post_reward("train-000000-001", 1.0)
    first = planned(store, late, 1)
    again = late_of(store, config)
    again.repeat(0, groups, {}, {})
    again.repeat(1, [], first.rewards, {})
    store.post_reward("train-000000-001", 0.25)
    assert again.corrections(2).samples == late.corrections(2).samples


def test_a_step_that_is_planned_again_finds_the_same(store: Posted, late: LateRewards) -> None:
    """Nothing is settled before a step is planned, so one that was not finds all of it again."""
    groups = [group_of(0, 1.0, 0.0)]
    late.remember(0, groups)
    store.post_reward("train-000000-001", 1.0)
    once = late.corrections(2)
    late.repeat(0, groups, {}, {})
    assert late.corrections(2) == once


def test_patience_with_a_reward_outlasts_a_restart(
    store: Posted, late: LateRewards, config: Config
) -> None:
    store.post_reward("train-000009-000", 1.0)
    for step in range(3):
        planned(store, late, step)
    again = late_of(store, config)
    again.repeat(2, [], {}, late.patience)
    assert planned(store, again, MAX_AGE).counts["expired"] == 0
    assert planned(store, again, MAX_AGE + 1).counts["expired"] == 1


@pytest.fixture
async def run(tmp_path: Path, config: Config) -> Path:
    with RunStore(tmp_path / "run", config) as store:
        store.enter(0, 0)
        await store.add_group(0, group_of(0, 1.0, 0.0))
    return tmp_path / "run"


def test_a_posted_reward_is_there_for_the_run(run: Path) -> None:
    post_reward(run, "train-000000-001", 0.5, "a person")
    with RunReader(run) as reader:
        (reward,) = reader.rewards()
    assert (reward.trace_id, reward.reward) == ("train-000000-001", 0.5)
    assert reward.source == "a person"


def test_a_reward_that_no_run_can_use_is_refused(run: Path, build_config: Any) -> None:
    with pytest.raises(LateRewardError, match="has no rollout 'train-000000-009'"):
        post_reward(run, "train-000000-009", 0.5)
    with pytest.raises(LateRewardError, match="the reward is nan but must be finite"):
        post_reward(run, "train-000000-001", float("nan"))
    with pytest.raises(LateRewardError, match="is not a run directory"):
        post_reward(run / "traces", "train-000000-001", 0.5)
    (run / "config.toml").write_text(dump_toml(build_config()))
    with pytest.raises(LateRewardError, match=r"late_rewards\.max_age is 0"):
        post_reward(run, "train-000000-001", 0.5)


@pytest.mark.parametrize("line", [b"{", '{"trace_id": "é"}'.encode("latin-1"), b'{"reward": 1}'])
def test_a_line_of_a_file_that_is_no_post_is_named_with_its_file(
    line: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "rewards.jsonl"
    file.write_bytes(b'{"trace_id": "train-000000-000", "reward": 0.5}\n' + line + b"\n")
    with pytest.raises(
        LateRewardError, match=r"rewards\.jsonl, line 2 is not a post .*UTF-8 lines"
    ):
        read_posts(file)
