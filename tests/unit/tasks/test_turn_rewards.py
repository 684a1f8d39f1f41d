"""Rewards of single turns: given by tools, or by functions that read the whole episode."""

from __future__ import annotations

import random
from typing import Any

import pytest

from composer_mesh import (
    Session,
    SyncSession,
    Task,
    TaskSettings,
    ToolError,
    Transcript,
    reward,
    tool,
    turn_reward,
)
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.running import RunningEpisode


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
