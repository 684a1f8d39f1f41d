"""A policy that tries attacks at random, with the tools of an agent: none of its episodes succeeds.

`nox -s attacks` plays 2,000 episodes; COMPOSER_MESH_ATTACK_EPISODES says how many.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from attacked_task import write_tasks
from code_attacks import RUNTIME, TREES
from real_boxes import why_no_boxes
from sandbox_attempts import ATTEMPTS

from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.plugins.code_tasks.work import CodeWork
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

EPISODES = int(os.environ.get("COMPOSER_MESH_ATTACK_EPISODES", "8"))
SEED = int(os.environ.get("COMPOSER_MESH_ATTACK_SEED", "0"))
BOXES = 2
QUICK = [one for one in RUNTIME if not one.slow]
WHERE = [
    one for one in ATTEMPTS if platform.machine() == "x86_64" or "syscall(" not in ATTEMPTS[one]
]


@dataclass
class Tried:
    """What a policy tried in some episodes, and what came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    solved: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CodeTask]:
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    file = write_tasks(tmp_path_factory.mktemp("attacked") / "tasks.jsonl")
    made = CodeTask.create(TaskSettings(path=file, max_turns=200), tests_s=10.0, values_s=10.0)
    made.sandbox = Boxes(boxes=BOXES, bytecode=True)
    yield made
    asyncio.run(made.sandbox.close())


def actions(rng: random.Random, written: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the calls of one episode, each with the name of the attack that it is part of.

    Adds the paths that are written on the way.
    """
    chosen = rng.sample(TREES, rng.choice([0, 1, 2])) + rng.sample(QUICK, rng.choice([0, 1, 1]))
    for attack in chosen:
        for path, content in attack.edits.items():
            text = (content or b"").decode("utf-8", "replace")
            written.add(path)
            yield attack.id, call_text("write_file", {"path": path, "content": text})
    for name in rng.sample(WHERE, rng.choice([0, 1])):
        yield name, call_text("run_command", {"command": ["python3", "-c", ATTEMPTS[name]]})
    if rng.random() < 0.3:
        yield "tests", call_text("run_tests", {})
    yield "submit", call_text("submit", {})


async def play(task: CodeTask, number: int, found: Tried) -> None:
    rng, tried, written = random.Random(f"{SEED}:{number}"), list[str](), set[str]()
    episode = RunningEpisode(task, task.episode("train", 0), TaskCalls())
    await episode.begin()
    for name, text in actions(rng, written):
        tried.append(name)
        step = await episode.step(text)
        said = str(step.messages[0]["content"]) if step.messages else ""
        ended = said.startswith("exit code") and not said.startswith("exit code 0")
        own = any(f"TOOK /w/{path}\n" in said for path in written)  # what it wrote itself
        if name in ATTEMPTS and ended and not own:
            found.left.append(f"episode {number}: {name}: {said[:300]}")
        if step.done:  # some attacks write more files than an episode has turns
            break
    outcome = await episode.outcome()
    session = episode._session
    assert isinstance(session, CodeWork)
    flagged = "flagged" if session.judgement.flags else "failed"
    found.outcomes["solved" if outcome.success else flagged] += 1
    if outcome.success or outcome.reward >= 1:
        found.solved.append(f"episode {number}: {tried}")
    await episode.close()


async def test_no_episode_of_a_policy_that_tries_attacks_at_random_succeeds(
    task: CodeTask, capsys: pytest.CaptureFixture[str]
) -> None:
    found, numbers = Tried(), iter(range(EPISODES))

    async def player() -> None:
        for number in numbers:
            await play(task, number, found)

    await asyncio.gather(*(player() for _ in range(BOXES)))
    with capsys.disabled():
        print(f"\n{EPISODES} episodes of attacks: {dict(found.outcomes)}")
    assert found.outcomes.total() == EPISODES
    assert found.solved == []
    assert found.left == []
