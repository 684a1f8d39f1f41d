"""Workflows: what a user's own code generates becomes trajectories, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from workflow_ports import Ports, sample

from composer_mesh import Conversation, Engine, Episode, Trajectory, Workflow
from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import EpisodePlayer
from composer_mesh.rollouts.traces import Message, Trace
from composer_mesh.services.steps.advantages import compared_with_each_other
from composer_mesh.tasks.errors import TaskCodeError, TaskError, TaskTimeout
from composer_mesh.tasks.toolbox import ToolboxTask


@pytest.fixture
def ports(toolbox: ToolboxTask, tokenizer: Any) -> Ports:
    return Ports(toolbox, ChatFormat(tokenizer, toolbox.tools), lambda number: f"word {number}")


async def played(ports: Ports, workflow: Workflow, limit_s: float = 60.0) -> Trace:
    player = WorkflowPlayer(workflow, ports, ports, ports.chat, limit_s)
    return (await player.play(sample(ports.task), "train-000000-000")).trace


class ToolLoop(Workflow):
    """The native loop, as a workflow."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        sites, done = [], False
        async with engine.environment() as session:
            agent = engine.conversation(session.messages)
            while not done:
                step = await session.step(await agent.act())
                sites += [step.error] if step.error else []
                done = step.done
                if not done:
                    agent.say(step.messages)
            outcome = await session.finish()
        return [
            agent.trajectory(
                outcome.reward,
                success=outcome.success,
                error_sites=sites,
                rewards=outcome.rewards,
            )
        ]


async def test_the_native_loop_as_a_workflow_gives_the_same_trace(ports: Ports) -> None:
    messages: list[Message] = []

    def expert(_: int) -> str:
        (session,) = ports.sessions.values()
        messages[:] = session.messages
        return ports.task.expert(messages)

    ports.answer = expert
    by_workflow = await played(ports, ToolLoop())
    native = await EpisodePlayer(ports, ports, ports.chat).play(sample(ports.task), "native")
    assert by_workflow == native.trace
    assert by_workflow.success
    assert [one.seed for one in ports.requests[: len(by_workflow.turns)]] == [
        one.seed for one in ports.requests[len(by_workflow.turns) :]
    ]


class PlannerAndWorker(Workflow):
    """Two agents in one episode, the planner's first message as context only."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        planner = engine.conversation(episode.payload["question"], role="planner")
        plan = await planner.act(trained=False)
        workers = [engine.conversation(f"{plan} {n}", role="worker", tools=[]) for n in range(2)]
        await asyncio.gather(*(worker.act() for worker in workers))
        planner.say("Both are done.")
        await planner.act()
        outcome = await engine.score(planner.messages)
        return [planner.trajectory(outcome.reward), *(w.trajectory(0.5) for w in workers)]


async def test_several_agents_are_several_trajectories_compared_by_role(ports: Ports) -> None:
    trace = await played(ports, PlannerAndWorker())
    assert [one.role for one in trace.trajectories()] == ["planner", "worker", "worker"]
    assert [one.trace_id for one in trace.trajectories()] == [
        "train-000000-000",
        "train-000000-000.1",
        "train-000000-000.2",
    ]
    assert [turn.trained for turn in trace.turns] == [False, True]
    for one in trace.trajectories():
        sent = [request.prompt_ids for request in ports.requests]
        assert all(one.prompt_ids(turn) in sent for turn in range(len(one.turns)))
        assert one.answer == ports.task.verified_answer(ports.task.episode("train", 0))
    sizes = [len(part) for part in compared_with_each_other([trace, trace]) if part]
    assert sizes == [2, 4]


async def test_the_share_of_sampled_tokens_that_train_leaves_out_context(ports: Ports) -> None:
    player = WorkflowPlayer(PlannerAndWorker(), ports, ports, ports.chat, 60.0)
    played = await player.play(sample(ports.task), "train-000000-000")
    sizes = [len(ports.chat.action(f"word {number}")) for number in range(4)]
    assert played.sampled_tokens == sum(sizes)
    assert played.prompt_tokens == sum(len(request.prompt_ids) for request in ports.requests)
    assert played.trained_tokens == sum(sizes[1:])


class Greedy(Workflow):
    """ReMax: the greedy answer's reward is the baseline."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        question = episode.payload["question"]
        baseline = engine.conversation(question)
        await baseline.act(greedy=True)
        agent = engine.conversation(question)
        await agent.act()
        rewards = [(await engine.score(one.messages)).reward for one in (agent, baseline)]
        return [agent.trajectory(rewards[0], advantage=rewards[0] - rewards[1])]


async def test_a_greedy_baseline_gives_an_advantage_of_its_own(ports: Ports) -> None:
    answer = ports.task.verified_answer(ports.task.episode("train", 0))
    ports.answer = lambda number: ("Answer: -1", f"Answer: {answer}")[number]
    trace = await played(ports, Greedy())
    assert [request.temperature for request in ports.requests] == [0.0, 1.0]
    assert (trace.reward, trace.advantage) == (1.0, 1.0)
    assert compared_with_each_other([trace]) == [[]]


class ByTurn(Workflow):
    """Two turns with rewards and advantages of their own, as `given` says."""

    def __init__(self, **given: list[float]) -> None:
        self.given: Any = given

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        agent = engine.conversation(episode.payload["question"])
        await agent.act()
        agent.say("Again.")
        await agent.act()
        return [agent.trajectory(1.5, **self.given)]


async def test_a_workflow_gives_turns_rewards_and_advantages_of_their_own(ports: Ports) -> None:
    trace = await played(ports, ByTurn(turn_rewards=[0.5, 0], turn_advantages=[1, -1.0]))
    assert (trace.turn_rewards, trace.turn_advantages) == ([0.5, 0.0], [1.0, -1.0])
    assert (trace.outcome, trace.has_own_advantage) == (1.0, True)


async def test_a_screened_trajectory_of_a_workflow_has_no_advantage(ports: Ports) -> None:
    trace = await played(ports, ByTurn(turn_advantages=[1, -1.0], screened=True))  # type: ignore[arg-type]
    assert (trace.screened, trace.advantage, trace.turn_advantages) == (True, 0.0, [])


@pytest.mark.parametrize("kind", ["turn_rewards", "turn_advantages"])
async def test_numbers_of_turns_are_one_for_each_and_finite(ports: Ports, kind: str) -> None:
    with pytest.raises(TaskError, match=f"1 {kind} for 2 turns of a trajectory"):
        await played(ports, ByTurn(**{kind: [1.0]}))
    with pytest.raises(TaskError, match=f"the {kind} nan for a trajectory"):
        await played(ports, ByTurn(**{kind: [1.0, float("nan")]}))


class Samples(Workflow):
    """Several continuations of one text, ended at a word."""

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        found = await engine.generate("Say it.", n=3, stop=["2"], max_tokens=20)
        assert [one.text for one in found] == ["word 0", "word 1", "word "]
        assert [len(one.result.token_ids) for one in found] == [
            len(one.result.logprobs) for one in found
        ]
        ids = await engine.generate(found[0].prompt_ids)
        assert ids[0].prompt_ids == found[0].prompt_ids
        agent = Conversation(engine, [{"role": "user", "content": "q"}])
        await agent.act()
        return [agent.trajectory(0)]


async def test_continuations_have_a_number_a_length_and_an_end(ports: Ports) -> None:
    await played(ports, Samples())
    assert len({request.request_id for request in ports.requests}) == 5


class Raises(Workflow):
    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        async with engine.environment():
            raise KeyError("mine")


class Waits(Workflow):
    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        await asyncio.Event().wait()
        return []


class ReturnsNothing(Workflow):
    async def run(self, episode: Episode, engine: Engine) -> Any:
        return []


class ReturnsNan(Workflow):
    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        agent = engine.conversation("q")
        await agent.act()
        return [agent.trajectory(float("nan"))]


class NeverAsked(Workflow):
    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        agent = engine.conversation("q")
        await agent.act()
        await agent.act()
        return []


class Resumable(Workflow):
    """Opens things in this order, though another worker may have to open them again."""

    resumable = True

    def __init__(self, *opened: str) -> None:
        self.opened = opened

    async def run(self, _: Episode, engine: Any) -> list[Trajectory]:
        async with AsyncExitStack() as stack:
            for name in self.opened:
                await stack.enter_async_context(getattr(engine, name)())
        return []


@pytest.mark.parametrize(
    ("workflow", "limit_s", "error", "said"),
    [
        (Raises(), 60.0, TaskCodeError, r"workflow Raises failed at .*workflows\.py:\d+: KeyError"),
        (Waits(), 0.01, TaskTimeout, "workflow Waits did not return within 0.01 s"),
        (ReturnsNothing(), 60.0, TaskError, "return at least one Trajectory"),
        (ReturnsNan(), 60.0, TaskError, "returned the reward nan"),
        (NeverAsked(), 60.0, TaskCodeError, "say"),
        (Resumable("environment"), 60.0, TaskError, "opens its environment before its agent"),
        (Resumable("agent", "agent"), 60.0, TaskError, "opens a second agent: use one"),
    ],
)
async def test_a_faulty_workflow_fails_its_attempt_with_one_clear_line(
    ports: Ports, workflow: Workflow, limit_s: float, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await played(ports, workflow, limit_s)
    assert not ports.sessions
    assert len(ports.abandoned) == isinstance(workflow, Raises)


async def test_a_resumable_workflow_has_one_environment(ports: Ports) -> None:
    workflow = Resumable("agent", "environment", "environment")
    with pytest.raises(TaskError, match="opens a second environment: use one"):
        await played(ports, workflow)
    assert ports.abandoned == ["train-000000-000"]  # as the attempt: another worker can adopt it


async def test_a_workflow_is_cancelled_with_its_sample(ports: Ports) -> None:
    playing = asyncio.create_task(played(ports, Waits()))
    await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
