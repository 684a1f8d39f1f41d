"""Numbers that tasks return as rewards, and errors that cannot be written.

Rewards of single turns: given by tools, or by functions that read the whole episode.

Group rewards: one function reads all samples of an episode and returns a number for each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from composer_mesh import (
    JudgesSpent,
    Row,
    Session,
    SyncSession,
    Task,
    TaskSettings,
    ToolError,
    Transcript,
    group_reward,
    reward,
    tool,
    turn_reward,
)
from composer_mesh.rollouts.tasks import FinishedRollout, GroupScore
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.reward import finite_number
from composer_mesh.tasks.running import RunningEpisode, score_group


class Silent(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Worth(Task):
    """An episode that is worth what is given, or fails by it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"number": rng.randint(1, 10**6)}

    def prompt(self, row: Any) -> str:
        return "q"

    @reward
    def worth(self, transcript: Transcript) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def reward_of(value: Any) -> float:
    task = Worth.create(value=value)
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("a")
        return session.outcome().reward


@pytest.mark.parametrize(
    "value",
    [
        *(0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)),
        torch.tensor(0.5, dtype=torch.bfloat16),
    ],
)
def test_a_single_number_of_numpy_and_torch_is_a_reward(value: Any) -> None:
    assert reward_of(value) == 0.5


@pytest.mark.parametrize("value", [True, np.True_, np.int64(1), torch.tensor(True), 1])
def test_truth_is_worth_one(value: Any) -> None:
    assert reward_of(value) == 1.0


@pytest.mark.parametrize(
    "value",
    [10**400, float("nan"), np.inf, torch.tensor([1.0]), np.array("a"), "1", None],
)
def test_what_is_no_finite_number_is_no_reward(value: Any) -> None:
    assert finite_number(value) is None
    with pytest.raises(UnusableTask, match="return a finite number"):
        reward_of(value)


def test_an_error_whose_text_fails_is_still_named_with_its_line() -> None:
    with pytest.raises(TaskCodeError, match=r"test_rewards\.py:\d+: Silent: <a Silent whose text"):
        reward_of(Silent())


def test_an_integer_too_long_to_write_is_no_reward() -> None:
    with pytest.raises(UnusableTask, match="a int whose text fails by ValueError"):
        reward_of(10**5000)


class Steps(Session):
    """Each step in the right direction is rewarded at once."""

    @tool
    def step(self, size: int) -> str:
        """Goes some steps."""
        self.add_reward(0.25)
        if size < 0:
            self.add_reward(-1.0)
            raise ToolError("backwards", "the wrong way", {})
        return "ok"

    @tool
    def odd(self) -> str:
        """Gives what is no reward."""
        self.add_reward(float("nan"))
        return "ok"


class Walk(Task):
    """Go forward."""

    session_class = Steps

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"goal": rng.random()}

    def prompt(self, row: Any) -> str:
        return "Go."

    @reward
    def arrived(self, transcript: Transcript) -> float:
        return 1.0


class Judged(Walk):
    """The same, with a reward of turns that reads the whole episode."""

    returned: Any = None

    @turn_reward(weight=0.5, name="late")
    async def later(self, transcript: Transcript) -> Any:
        return self.returned or list(range(transcript.turns))


def played(task: Task, *sizes: int) -> SyncSession:
    session = SyncSession(task, task.episode("train", 0))
    for size in sizes:
        session.step(call_text("step", {"size": size}))
    session.step("done")
    return session


def test_what_a_tool_gives_is_the_reward_of_its_turn_and_a_part_of_the_episodes() -> None:
    outcome = played(Walk.create(TaskSettings(tool_error_penalty=0.5)), 1, -1).outcome()
    assert outcome.turn_rewards == [0.25, -0.75, 0.0]
    assert outcome.reward == 1.0 - 0.5 - 0.5, "the sum of the turns, and the penalty of one error"
    assert outcome.success, "which rewards of turns do not decide"


def test_a_function_gives_each_turn_a_reward_with_its_weight() -> None:
    outcome = played(Judged.create(), 1, 1).outcome()
    assert outcome.turn_rewards == [0.25, 0.75, 1.0]
    assert outcome.rewards == {"arrived": 1.0, "late": 3.0}
    assert outcome.reward == 3.0


def test_an_episode_without_any_has_no_rewards_of_turns() -> None:
    outcome = played(Walk.create()).outcome()
    assert (outcome.turn_rewards, outcome.reward) == ([], 1.0)


async def test_a_conversation_without_a_session_has_a_reward_for_each_message_of_the_agent() -> (
    None
):
    task = Judged.create()
    said = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    outcome = await RunningEpisode(task, task.episode("train", 0)).outcome(said)
    assert outcome.turn_rewards == [0.0, 0.5]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "returned 1 numbers for 2 turns: return one for each of the agent's turns"),
        (3.0, r"returned '3\.0': return a list of numbers"),
        ("no", "returned 'no': return a list of numbers"),
        ([1.0, float("inf")], "returned 'inf': give finite numbers"),
        ([1.0, None], "returned 'None': give finite numbers"),
    ],
)
def test_other_rewards_of_turns_are_refused_with_the_functions_name(
    returned: Any, said: str
) -> None:
    task = Judged.create()
    task.returned = returned
    with pytest.raises(UnusableTask, match=f"turn reward 'late' {said}"):
        played(task, 1).outcome()


def test_a_tool_that_gives_no_finite_number_is_refused() -> None:
    task = Walk.create()
    session = SyncSession(task, task.episode("train", 0))
    with pytest.raises(UnusableTask, match="add_reward was given 'nan'"):
        session.step(call_text("odd", {}))


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
