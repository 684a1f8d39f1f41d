"""Finished groups: group rewards are added, and failures of theirs never become rewards.

A rollout that its task screens is stored with its reward, and trains nothing in any channel.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from controller_world import CHANNELS, World, finished, trace_of

from composer_mesh import JudgesSpent, Row, Task, Transcript, group_reward
from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Played, Sample, Sampling
from composer_mesh.rollouts.hints import chosen_sibling
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, PoisonedInput
from composer_mesh.rollouts.traces import Trace, trace_from_json, trace_to_json
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.services.steps.advantages import make_advantages, trajectory_advantages
from composer_mesh.services.store.group_files import group_bytes, traces_of
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.toolbox import ToolboxTask


class Screening(ToolboxTask):
    """Screens whatever succeeded."""

    def screened(self, transcript: Transcript) -> bool:
        return transcript.session is not None and bool(getattr(transcript.session, "solved", False))


async def test_a_screened_rollout_keeps_its_reward_and_is_compared_with_no_other(
    tokenizer: Any, build_config: Any
) -> None:
    task = Screening.create()
    world = World(task, ChatFormat(tokenizer, task.tools), seed=13)
    sampling = Sampling(0.0, 64, 10_000, 0)
    screened = await trace_of(world, Sample(task.episode("train", 0), 0, 0, sampling))
    assert (screened.reward, screened.success, screened.advantage) == (1.0, True, 0.0)
    others = [
        replace(screened, trace_id=str(place), reward=reward, advantage=None)
        for place, reward in enumerate((0.0, 1.0))
    ]
    advantages = make_advantages(build_config().advantage)
    with_it = trajectory_advantages(advantages, [[screened, *others]])
    assert with_it.pop(screened.trace_id) == 0.0
    assert with_it == trajectory_advantages(advantages, [others])
    assert screened.screened


class HalfScreened(ToolboxTask):
    """Screens about half of all rollouts, by what they said."""

    def screened(self, transcript: Transcript) -> bool:
        said = "".join(str(one["content"]) for one in transcript.messages)
        return transcript.session is not None and zlib.crc32(said.encode()) % 2 == 0


SOURCES = {"sources": ["sibling", "error", "feedback"]}


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_nothing_of_a_screened_rollout_is_trained_in_any_channel(
    max_lag: int, tokenizer: Any, build_config: Any
) -> None:
    task = HalfScreened.create()
    config = build_config(
        run={"name": "unit", "seed": 3, "steps": 8},
        schedule={"prompts_per_step": 2, "group_size": 4, "max_lag": max_lag},
        **{**CHANNELS, "sdpo": {"alpha": 0.5, "max_sites_per_step": 64, "hints": SOURCES}},
    )
    world = World(task, ChatFormat(tokenizer, task.tools), seed=5)
    await finished(world, config)
    stored: dict[str, Trace] = {one.trace_id: one for one in world.names("stored")}
    apart = {name for name, one in stored.items() if one.screened}
    assert any(stored[name].error_sites for name in apart)
    assert any(stored[name].error_sites for name in stored.keys() - apart)
    batches = world.names("trained")
    hinted = {view.trace_id for batch in batches for view in batch.views}
    asked = set(world.names("asked"))
    moved = {one.trace_id for batch in batches for one in batch.samples if one.advantage}
    paired = {one.pair_id for batch in batches for one in batch.pairs}
    for used in (hinted, asked, moved):
        assert used
        assert not used & apart
    assert paired
    assert not [one for one in paired if any(name in one for name in apart)]


async def test_a_screened_rollout_is_no_demonstration_and_gets_no_hint(
    tokenizer: Any, build_config: Any
) -> None:
    task = ToolboxTask.create()
    chat = ChatFormat(tokenizer, task.tools)
    world = World(task, chat, seed=13)
    sampling = Sampling(0.0, 64, 10_000, 0)
    won = await trace_of(world, Sample(task.episode("train", 0), 0, 0, sampling))
    failed = replace(won, trace_id="failed", success=False)
    assert chosen_sibling(failed, [won, failed]) == won
    assert chosen_sibling(failed, [replace(won, screened=True), failed]) is None
    hints = build_config(sdpo={"alpha": 0.5, "hints": SOURCES}).sdpo.hints
    for screened, count in ((False, 1), (True, 0)):
        group = [won, replace(failed, screened=screened)]
        found = hinted_sites(group, chat, lambda _: None, 8, 10_000, hints)
        assert len(found.views) == count


async def test_a_screened_rollout_is_stored_as_one(tokenizer: Any) -> None:
    task = ToolboxTask.create()
    world = World(task, ChatFormat(tokenizer, task.tools), seed=13)
    sampling = Sampling(0.0, 64, 10_000, 0)
    trace = await trace_of(world, Sample(task.episode("train", 0), 0, 0, sampling))
    for screened in (False, True):
        one = replace(trace, screened=screened)
        assert trace_from_json(trace_to_json(one)) == one
        assert traces_of(group_bytes([one])) == [one]


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
