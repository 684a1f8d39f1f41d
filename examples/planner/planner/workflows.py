"""Workflows with several agents, a baseline, and context that is not trained."""

import asyncio
from collections.abc import Sequence

from composer_mesh import Conversation, Engine, Episode, Outcome, Trajectory, Workflow
from planner.tasks import pairs_of, question


class PlannerAndWorkers(Workflow):
    """A planner divides the question, workers answer the parts, and the planner answers.

    Each worker is rewarded for its own part, the planner for its answer, and a plan of two pairs
    is a reward of its turn. All of them are one policy, and are compared by role. A question of two
    numbers goes to a worker at once.
    """

    def __init__(self, plan_reward: float = 0.2) -> None:
        self.plan_reward = plan_reward

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        given = episode.payload["numbers"]
        if len(given) == 2:
            return [await self._work(engine, given)]
        planner = engine.conversation(question(given), role="planner")
        pairs = pairs_of(await planner.act())
        workers = await asyncio.gather(*(self._work(engine, pair) for pair in pairs))
        answers = "; ".join(worker.messages[-1]["content"] for worker in workers)
        planner.say(answers or "error: write two pairs")
        await planner.act()
        outcome = await engine.score(planner.messages)
        planned = self.plan_reward * (len(pairs) == 2)
        said = planner.trajectory(
            outcome.reward + planned, success=outcome.success, turn_rewards=[planned, 0.0]
        )
        return [said, *workers]

    async def _work(self, engine: Engine, pair: list[int]) -> Trajectory:
        worker = engine.conversation(question(pair), role="worker")
        answer = await worker.act()
        return worker.trajectory(float(answer.strip() == str(max(pair))))


class ReMax(Workflow):
    """The reward of the greedy answer is the baseline, so that no group is needed."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        (agent, outcome), (_, greedy) = await asyncio.gather(
            solved(engine), solved(engine, greedy=True)
        )
        advantage = outcome.reward - greedy.reward
        return [agent.trajectory(outcome.reward, success=outcome.success, advantage=advantage)]


class SelfCritique(Workflow):
    """The agent answers, gets the question whether that is right, and answers once more.

    The second answer counts. The first one is context only: it is not trained.
    """

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        async with engine.environment() as session:
            agent = engine.conversation(session.messages)
            step = await session.step(await agent.act(trained=False))
            agent.say(step.messages)
            await session.step(await agent.act())
            outcome = await session.finish()
        return [agent.trajectory(outcome.reward, success=outcome.success)]


async def solved(engine: Engine, greedy: bool = False) -> tuple[Conversation, Outcome]:
    """Have an agent play a session of the task to its end."""
    async with engine.environment() as session:
        agent = engine.conversation(session.messages)
        while not (step := await session.step(await agent.act(greedy=greedy))).done:
            agent.say(step.messages)
        return agent, await session.finish()
