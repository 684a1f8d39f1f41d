"""Harnesses play through a whole mesh: what they sampled is captured exactly, and it trains.

A small harness of the tests always; Claude Code and Codex by `nox -s harnesses`. The policy is the
tasks' expert, whose tokens get their log-probs from a model with 64 k positions in float32.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import small_harness
from mesh_harness import FinishedRun, HarnessRuns

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.plugins.harbor.containers.opening import open_containers
from composer_mesh.plugins.harbor.harness import PROGRAM
from composer_mesh.plugins.harbor.harness_agent import RECIPES
from composer_mesh.tasks.errors import UnusableTask

PROGRAMS = "COMPOSER_MESH_TEST_HARNESSES"
"""Names the folder of the harnesses from npm."""
HARNESSES = ("claude-code", "codex")
SIMPLE = {"CLAUDE_CODE_SIMPLE": "1"}
LARGEST_MISMATCH = 1e-4
"""Nats, of any sampled token, between the engine and the trainer."""
LEARNED = 0.3
"""Nats by which the expert's first answer gains between the first step and the last, at least."""
TURNS = 3

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def runs() -> HarnessRuns:
    """What runs need, in a folder that users of containers may enter."""
    folder = entered_folder()
    try:
        containers = open_containers("bubblewrap", cache=str(folder / "cache"))
    except UnusableTask as error:
        pytest.skip(str(error))
    asyncio.run(containers.close())
    programs = Path(os.environ.get(PROGRAMS, folder / "none"))
    found = [one for name in HARNESSES for one in programs.glob(RECIPES[name].program)]
    (folder / "program").mkdir()
    shutil.copy(small_harness.__file__, folder / "program")
    return HarnessRuns(folder, found)


def check(run: FinishedRun, steps: int, episodes: int) -> None:
    """Compare what was served, stored and trained, token by token and step by step."""
    served, traces = run.served(), run.traces()
    assert len(traces) == steps * episodes
    for trace in traces:
        assert trace.reward == 1.0, trace.messages[-1]
        assert len(trace.turns) == TURNS
        for number, turn in enumerate(trace.turns):
            answer = served[f"{trace.trace_id}-{number:02d}"]
            assert turn.trained
            assert list(trace.prompt_ids(number)) == answer.prompt
            assert list(turn.action_ids) == answer.ids
            assert list(turn.logprobs) == answer.logprobs
            assert list(turn.versions) == answer.versions
        assert sum(len(one.get("tool_calls", ())) for one in trace.messages) >= TURNS - 1
    tokens = sum(len(turn.action_ids) for trace in traces for turn in trace.turns)
    assert [step["policy_version"] for step in run.steps] == list(range(1, steps + 1))
    assert sum(step["logprob_mismatch/same_version/tokens"] for step in run.steps) == tokens
    for step in run.steps:
        assert step["reward/mean"] == step["rollouts/trained_share"] == 1.0
        assert step["logprob_mismatch/max"] <= LARGEST_MISMATCH
        assert step["policy/grad_norm"] > 0
    assert {version for trace in traces for version in trace.versions()} == set(range(steps))
    if steps > 2:  # one update may teach too little of that answer
        before, after = (first_answers(run, version) for version in (0, steps - 1))
        assert after > before + LEARNED


def first_answers(run: FinishedRun, version: int) -> float:
    """Return the mean log-prob of a token of the first answers that a version has given."""
    found = [
        value
        for trace in run.traces()
        if trace.turns[0].versions[0] == version
        for value in trace.turns[0].logprobs
    ]
    return sum(found) / len(found)


def test_a_harness_plays_and_trains_through_a_mesh(runs: HarnessRuns) -> None:
    command = ["python3", f"{PROGRAM}/small_harness.py", "1", "9", "0"]
    run = runs.train("small", steps=2, prompts=1, command=command, program="../program")
    check(run, steps=2, episodes=2)


@pytest.mark.skipif(
    PROGRAMS not in os.environ, reason=f"nox -s harnesses installs them and sets {PROGRAMS}"
)
@pytest.mark.parametrize(
    ("harness", "variables", "steps"),
    [("claude-code", SIMPLE, 5), ("claude-code", {}, 1), ("codex", {}, 5)],
)
def test_an_unmodified_harness_plays_four_episodes_a_step_through_a_mesh(
    runs: HarnessRuns, harness: str, variables: Mapping[str, str], steps: int
) -> None:
    run = runs.train(
        "-".join([harness, *variables]),
        steps=steps,
        prompts=2,
        harness=harness,
        program=os.environ[PROGRAMS],
        environment=variables,
    )
    check(run, steps=steps, episodes=4)
