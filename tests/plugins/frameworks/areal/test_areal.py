"""AReaL's shipped workflows on our generators, and its decoupled PPO beside ours."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from workflow_ports import Ports, sample

from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.plugins.frameworks.areal import ArealWorkflow, ppo_actor_loss
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

pytestmark = pytest.mark.filterwarnings("ignore")
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577",
    "OMP_NUM_THREADS": "1",
}
RECORDED = Path(__file__).parents[1] / "unit" / "recorded" / "areal.json"


async def played(policy: Path, make: str, said: list[str]) -> tuple[Any, Ports]:
    """The trace of one episode by a workflow, and the ports that it was played against."""
    task = ToolboxTask.create(TaskSettings(seed=3))
    chat = ChatFormat(load_tokenizer(policy), task.tools)
    ports = Ports(task, chat, lambda number: said[min(number, len(said) - 1)])
    workflow = ArealWorkflow(f"areal_workflows:{make}", str(policy))
    player = WorkflowPlayer(workflow, ports, ports, chat, limit_s=300.0)
    try:
        return (await player.play(sample(task), "s")).trace, ports
    finally:
        await player.close()


async def test_a_shipped_workflow_of_one_turn_is_trained_by_its_ids(policy: Path) -> None:
    trace, ports = await played(policy, "one_turn", ["That is 7."])
    (turn,) = trace.turns
    assert turn.context_ids == ports.requests[0].prompt_ids
    assert ports.chat.action_text(turn.action_ids) == "That is 7."
    assert turn.logprobs == [-1.0] * len(turn.action_ids)
    assert turn.versions == [3] * len(turn.action_ids)
    assert (trace.reward, trace.success) == (1.0, True)


async def test_a_shipped_workflow_of_several_turns_has_each_as_a_turn(policy: Path) -> None:
    trace, ports = await played(policy, "several_turns", ["No idea.", "That is 7."])
    assert len(trace.turns) == 2
    assert trace.prompt_ids(1) == ports.requests[1].prompt_ids
    assert trace.reward == 0.5, "its discount of a second try"


async def test_the_remax_of_its_guide_asks_for_a_sample_and_a_greedy_answer(policy: Path) -> None:
    trace, ports = await played(policy, "remax", ["That is 7."])
    assert sorted(one.temperature for one in ports.requests) == [0.0, 1.0]
    assert trace.reward == 0.0


async def test_a_rejected_episode_is_stored_and_not_trained(policy: Path) -> None:
    trace, _ = await played(policy, "rejects", ["That is 7."])
    assert trace.screened
    assert trace.turns


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eps_clip_higher": 0.28, "c_clip": 3.0},
        {"rejection_sampling": {"action": "mask", "metric": "ratio", "upper": 1.3}},
        {"rejection_sampling": {"action": "clamp", "metric": "ratio", "upper": 1.2}},
        {"rejection_sampling": {"action": "mask", "metric": "kl_k3", "upper": 0.02}},
    ],
)
def test_decoupled_ppo_with_recomputed_proximal_logprobs_equals_its_own(
    options: dict[str, Any],
) -> None:
    from areal.api.cli_args import RejectionSamplingConfig
    from areal.utils.functional import ppo_actor_loss_fn

    generator = torch.Generator().manual_seed(0)
    logprobs = (-2 * torch.rand(4, 9, generator=generator)).requires_grad_()
    proximal = logprobs.detach() + 0.2 * torch.randn(4, 9, generator=generator)
    old = proximal + 0.2 * torch.randn(4, 9, generator=generator)
    advantages = torch.randn(4, 9, generator=generator)
    mask = torch.rand(4, 9, generator=generator) > 0.3
    theirs = {key: value for key, value in options.items() if key != "rejection_sampling"}
    if "rejection_sampling" in options:
        theirs["rejection_sampling"] = RejectionSamplingConfig(**options["rejection_sampling"])
    expected, _ = ppo_actor_loss_fn(
        logprobs, proximal, old, advantages, eps_clip=0.2, loss_mask=mask, **theirs
    )
    found = ppo_actor_loss(logprobs, proximal, old, advantages, mask, **options)
    gradients = [torch.autograd.grad(one, logprobs)[0] for one in (found, expected)]
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_the_recorded_names_are_those_of_the_release() -> None:
    from areal.api import ModelRequest, ModelResponse, RolloutWorkflow
    from areal.api.cli_args import GenerationHyperparameters, RejectionSamplingConfig
    from areal.engine.fsdp_engine import FSDPEngine
    from areal.utils.functional import ppo_actor_loss_fn

    classes = (ModelRequest, ModelResponse, GenerationHyperparameters, RejectionSamplingConfig)
    fields = {one.__name__: [f.name for f in dataclasses.fields(one)] for one in classes}
    called = {
        "ppo_actor_loss_fn": ppo_actor_loss_fn,
        "arun_episode": RolloutWorkflow.arun_episode,
        "forward_backward_batch": FSDPEngine.forward_backward_batch,
        "_normalize_batch_input": FSDPEngine._normalize_batch_input,
        "_prepare_mb_list": FSDPEngine._prepare_mb_list,
    }
    functions = {name: list(inspect.signature(one).parameters) for name, one in called.items()}
    found = {"version": "1.0.4", "fields": fields, "functions": functions}
    assert found == json.loads(RECORDED.read_text()), json.dumps(found)


def test_three_steps_of_three_channels_on_its_real_engine(policy: Path) -> None:
    script = Path(__file__).with_name("engine_steps.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(policy)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **ONE_RANK},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    steps, ours = json.loads(ended.stdout.splitlines()[-1])
    for name in ("loss/policy", "loss/sdpo", "loss/replay", "loss/total"):
        assert steps[0][name] == pytest.approx(ours[name], abs=1e-4), name
    assert len(steps) == 3
    assert steps[2]["loss/sdpo"] < steps[0]["loss/sdpo"]
    assert steps[2]["loss/replay"] < steps[0]["loss/replay"]
