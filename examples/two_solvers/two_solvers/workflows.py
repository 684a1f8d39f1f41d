"""Three workflows for any task of questions: several trajectories an episode, masks, baselines."""

import asyncio
from collections.abc import Sequence

from composer_mesh import Conversation, Engine, Episode, Outcome, Trajectory, Workflow


async def solved(engine: Engine, role: str, greedy: bool = False) -> tuple[Conversation, Outcome]:
    """Have an agent play a session of the task to its end."""
    async with engine.environment() as session:
        agent = engine.conversation(session.messages, role=role)
        while not (step := await session.step(await agent.act(greedy=greedy))).done:
            agent.say(step.messages)
        return agent, await session.finish()


class TwoSolvers(Workflow):
    """Two agents solve the same problem beside each other; both gain where both are right.

    Each is compared with the agents of its own role in the other samples of the group.
    """

    def __init__(self, bonus: float = 0.2) -> None:
        self.bonus = bonus

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        both = await asyncio.gather(solved(engine, "first"), solved(engine, "second"))
        together = self.bonus * all(outcome.success for _, outcome in both)
        return [
            agent.trajectory(outcome.reward + together, success=outcome.success)
            for agent, outcome in both
        ]


class ReMax(Workflow):
    """The reward of the greedy answer is the baseline, so that no group is needed."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        (agent, outcome), (_, greedy) = await asyncio.gather(
            solved(engine, ""), solved(engine, "", greedy=True)
        )
        advantage = outcome.reward - greedy.reward
        return [agent.trajectory(outcome.reward, success=outcome.success, advantage=advantage)]


class SelfCritique(Workflow):
    """The agent answers, reads its answer again, and answers once more; the last one counts.

    The first answer is context only: it is not trained.
    """

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        async with engine.environment() as session:
            agent = engine.conversation(session.messages)
            await agent.act(trained=False)
            agent.say("Is that right? Answer again.")
            await session.step(await agent.act())
            outcome = await session.finish()
        return [agent.trajectory(outcome.reward, success=outcome.success)]
