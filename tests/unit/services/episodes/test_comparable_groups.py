"""Finished groups: group rewards are added, and failures of theirs never become rewards."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from composer_mesh import JudgesSpent, Row, Task, Transcript, group_reward
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.rollouts.episode import Played, Sample
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, PoisonedInput
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.tasks.errors import UnusableTask


class Ranked(Task):
    """A task whose only reward compares samples."""

    def generate(self, rng: random.Random) -> Row:
        return {"n": rng.random()}

    def prompt(self, row: Row) -> str:
        return "?"

    @group_reward(weight=2.0)
    def rank(self, transcripts: Sequence[Transcript]) -> list[float]:
        return [0.0 for _ in transcripts]


@dataclass
class Scorer:
    """The port `Player`, of which only the scoring of groups is used."""

    ends: list[Exception] = field(default_factory=list)
    groups: list[Sequence[FinishedRollout]] = field(default_factory=list)
    poisoned: list[PoisonedInput] = field(default_factory=list)

    async def score_group(self, episode: Episode, group: Sequence[FinishedRollout]) -> GroupScore:
        assert episode == Episode("ranked", "train", 7)
        self.groups.append(group)
        if self.ends:
            raise self.ends.pop(0)
        return GroupScore({"rank": [float(place) for place in range(len(group))]})

    def announce(self, samples: Sequence[Sample]) -> list[object]:
        raise NotImplementedError

    async def play(self, sample: Sample, session: str) -> Played:
        raise NotImplementedError

    async def close(self) -> None: ...

    async def compared(self, *traces: Trace) -> list[Trace]:
        limits = SupervisionConfig(rollout_retries=2, poison_after=2)
        retries = EpisodeRetries(limits, self.poisoned.append, lambda *_, **__: None)
        return await Rollouts(self, retries).comparable(Ranked.create(), list(traces))  # type: ignore[arg-type]


def trace(sample: int, reward: float = 1.0) -> Trace:
    rewards = {"own": reward}
    name = f"train-000007-{sample:03d}"
    return Trace(name, 7, sample, "ranked", "train", 7, [], [], reward, False, [], rewards)


async def test_group_rewards_are_added_with_their_weight_and_stored_by_name() -> None:
    found = await Scorer().compared(trace(0), trace(2), trace(3))
    assert [one.reward for one in found] == [1.0, 3.0, 5.0]
    assert [one.rewards for one in found] == [{"own": 1.0, "rank": float(n)} for n in range(3)]


async def test_a_sample_alone_is_compared_with_none() -> None:
    scorer = Scorer()
    assert await scorer.compared(trace(0)) == [trace(0)]
    assert await scorer.compared() == []
    assert scorer.groups == []


async def test_all_trajectories_of_a_sample_share_its_value_but_those_with_an_advantage() -> None:
    helper, fixed = replace(trace(1, 0.5), role="helper"), replace(trace(1, 0.2), advantage=0.7)
    _, second = await Scorer().compared(trace(0), replace(trace(1), others=[helper, fixed]))
    assert (second.reward, second.others[0].reward) == (3.0, 2.5)
    assert second.others[1] == fixed


@pytest.mark.parametrize(
    ("error", "attempts", "poisoned"),
    [(lambda n: UnusableTask(f"nan {n}"), 3, 0), (lambda _: UnusableTask("nan"), 2, 1)],
)
async def test_a_group_reward_that_fails_leaves_no_rollout_to_train(
    error: Callable[[int], Exception], attempts: int, poisoned: int
) -> None:
    scorer = Scorer([error(n) for n in range(9)])
    assert await scorer.compared(trace(0), trace(1)) == []
    assert (len(scorer.groups), len(scorer.poisoned)) == (attempts, poisoned)


async def test_a_group_reward_that_fails_once_is_tried_again() -> None:
    found = await Scorer([UnusableTask("once")]).compared(trace(0), trace(1))
    assert [one.reward for one in found] == [1.0, 3.0]


async def test_a_spent_ceiling_ends_the_run() -> None:
    with pytest.raises(JudgesSpent):
        await Scorer([JudgesSpent("quality", "spent")]).compared(trace(0), trace(1))
