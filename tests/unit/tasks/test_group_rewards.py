"""Group rewards: one function reads all samples of an episode and returns a number for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from composer_mesh import JudgesSpent, Row, Task, TaskSettings, Transcript, group_reward, reward
from composer_mesh.rollouts.tasks import FinishedRollout, GroupScore
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.running import score_group


class Names(Task):
    """Find a name that the others have not found."""

    def generate(self, rng: random.Random) -> Row:
        return {"letter": rng.choice("abcdefgh")}

    def prompt(self, row: Row) -> str:
        return f"A name with {row['letter']}."

    @reward
    def named(self, transcript: Transcript) -> float:
        return float(bool(transcript.answer))

    @group_reward(weight=0.5)
    def different(self, transcripts: Sequence[Transcript]) -> list[float]:
        answers = [one.answer for one in transcripts]
        return [1 / answers.count(one) for one in answers]

    @group_reward(name="best")
    async def tournament(self, transcripts: Sequence[Transcript]) -> list[float]:
        assert all(one.session is None and one.ended == "unknown" for one in transcripts)
        most = max(len(one.answer) for one in transcripts)
        return [len(one.answer) == most and not one.errors for one in transcripts]


def group(*answers: str) -> list[FinishedRollout]:
    site = ErrorSite(0, "kind", "kind", {})
    return [
        FinishedRollout(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}],
            [site] if answer == "wrong" else [],
            {"named": 1.0},
        )
        for answer in answers
    ]


async def score(task: Task, *answers: str) -> GroupScore:
    return await score_group(task, task.episode("train", 0), group(*answers), TaskCalls())


async def test_each_group_reward_has_a_number_for_each_sample() -> None:
    task = Names.create()
    found = await score(task, "ann", "bob", "ann", "wrong")
    assert found.values == {"different": [0.5, 1.0, 0.5, 1.0], "best": [0.0, 0.0, 0.0, 0.0]}
    assert task.reward_weights == {"named": 1.0, "different": 0.5, "best": 1.0}


@pytest.mark.parametrize("returned", [[1.0], [1.0, float("nan")], 1.0, ["a", "b"], None])
async def test_anything_but_a_finite_number_for_each_is_refused(returned: Any) -> None:
    class Broken(Names):
        @group_reward
        def tournament(self, transcripts: Sequence[Transcript]) -> Any:
            return returned

    with pytest.raises(UnusableTask, match="group reward 'tournament' of task 'broken' returned"):
        await score(Broken.create(), "ann", "bob")


async def test_a_group_reward_that_raises_names_its_line() -> None:
    class Raising(Names):
        @group_reward
        def different(self, transcripts: Sequence[Transcript]) -> list[float]:
            raise ZeroDivisionError

    with pytest.raises(TaskCodeError, match=r"'different' of task 'raising' failed at .*\.py:\d+"):
        await score(Raising.create(), "ann", "bob")


async def test_a_group_reward_is_left_out_where_the_ceiling_of_judges_is_reached() -> None:
    class Judged(Names):
        @group_reward
        async def different(self, transcripts: Sequence[Transcript]) -> list[float]:
            raise JudgesSpent("quality", "spent")

    found = await score(Judged.create(TaskSettings(leave_out_spent=True)), "ann", "bobby")
    assert (found.values, found.left_out) == ({"best": [0.0, 1.0]}, ("different",))
    with pytest.raises(JudgesSpent):
        await score(Judged.create(), "ann", "bob")


def test_two_rewards_with_one_name_are_refused() -> None:
    class Twice(Names):
        @group_reward(name="named")
        def different(self, transcripts: Sequence[Transcript]) -> list[float]:
            return [0.0 for _ in transcripts]

    with pytest.raises(UnusableTask, match="a reward and a group reward named 'named'"):
        Twice.create().group_rewards  # noqa: B018
