"""A workflow with several trajectories an episode, for any task."""

import asyncio
from collections.abc import Sequence

from composer_mesh import Conversation, Engine, Episode, Outcome, Trajectory, Workflow


async def solved(engine: Engine, role: str) -> tuple[Conversation, Outcome]:
    """Have an agent play a session of the task to its end."""
    async with engine.environment() as session:
        agent = engine.conversation(session.messages, role=role)
        while not (step := await session.step(await agent.act())).done:
            agent.say(step.messages)
        return agent, await session.finish()


class TwoSolvers(Workflow):
    """Two agents solve the same problem in parallel; both gain where both are right.

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
