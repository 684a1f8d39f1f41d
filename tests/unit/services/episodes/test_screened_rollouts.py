"""A rollout that its task screens is stored with its reward, and trains nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controller_world import World, trace_of

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.services.steps.advantages import make_advantages, trajectory_advantages
from composer_mesh.tasks.reward import Transcript
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
