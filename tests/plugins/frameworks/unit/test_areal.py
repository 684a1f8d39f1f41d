"""AReaL's workflows on our engine, and our step on its engine; docs/areal.md."""

import dataclasses
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_areal import RECORDED, FakeEngine, row_of
from guides import Guide, as_a_run, names_in_code
from step_batches import ALL_ON, batch_of
from workflow_ports import Ports, sample

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.losses.decoupled import Rejection
from composer_mesh.plugins.frameworks.areal import ArealWorkflow, ppo_actor_loss, trajectories
from composer_mesh.plugins.frameworks.areal_training import ArealChannels, areal_step
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.toolbox import ToolboxTask

RATE = 0.05
WORKFLOW = """
from fake_areal import recorded_class

REQUEST, CONFIG = map(recorded_class, ("ModelRequest", "GenerationHyperparameters"))


class Echo:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def arun_episode(self, engine, data):
        import torch
        if data.get("refuse"):
            return None
        ids = self.tokenizer.encode(data["messages"][-1]["content"], add_special_tokens=False)
        config = CONFIG(n_samples=1, greedy=False, max_new_tokens=30, stop=None)
        request = REQUEST(rid="r", input_ids=ids, gconfig=config, tokenizer=self.tokenizer)
        said = await engine.agenerate(request)
        whole = said.input_tokens + said.output_tokens
        before = [0] * len(said.input_tokens)
        rows = {
            "input_ids": whole,
            "loss_mask": before + [1] * len(said.output_tokens),
            "logprobs": [0.0] * len(before) + said.output_logprobs,
            "versions": [-1] * len(before) + said.output_versions,
        }
        found = {name: torch.tensor([row]) for name, row in rows.items()}
        return {**found, "rewards": torch.tensor([1.0])}
"""


@pytest.fixture
def areal(tmp_path: Path, write_module: Any) -> Iterator[None]:
    """A package `areal` with the recorded classes, and a workflow written for it."""
    (tmp_path / "areal").mkdir()
    (tmp_path / "areal" / "__init__.py").touch()
    api = "from fake_areal import recorded_class\nModelResponse = recorded_class('ModelResponse')\n"
    (tmp_path / "areal" / "api.py").write_text(api)
    write_module("echo_workflows", WORKFLOW)
    yield
    for name in ("areal", "areal.api"):
        sys.modules.pop(name, None)


async def test_a_workflow_is_trained_by_the_ids_that_its_engine_sampled(
    areal: None, toolbox: ToolboxTask, tokenizer: Any, tmp_path: Any
) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    chat = ChatFormat(tokenizer, toolbox.tools)
    ports = Ports(toolbox, chat, lambda _: "seven")
    workflow = ArealWorkflow("echo_workflows:Echo", str(tmp_path / "model"))
    player = WorkflowPlayer(workflow, ports, ports, chat, limit_s=60.0)
    trace = (await player.play(sample(toolbox), "s")).trace
    (turn,) = trace.turns
    assert turn.context_ids == ports.requests[0].prompt_ids
    assert chat.action_text(turn.action_ids) == "seven"
    assert (turn.logprobs[0], turn.versions[0], trace.reward) == (-1.0, 3, 1.0)
    assert (ports.requests[0].max_new_tokens, ports.sessions) == (30, {})
    await player.close()


def test_a_result_without_token_rows_is_refused() -> None:
    with pytest.raises(UnusableTask, match="returned completion-1, without input_ids"):
        trajectories({"completion-1": object()}, [], str)


def test_the_loss_has_the_arguments_of_its_own() -> None:
    import inspect

    ours = inspect.signature(ppo_actor_loss).parameters
    theirs = RECORDED["functions"]["ppo_actor_loss_fn"]
    assert set(ours) == set(theirs) - {"importance_sampling_level", "cu_seqlens"}
    fields = [one.name for one in dataclasses.fields(Rejection)]
    assert fields == RECORDED["fields"]["RejectionSamplingConfig"]


@pytest.fixture
def alone() -> Any:
    """A process group of one."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_a_step_on_its_engine_is_our_step(
    alone: None, build_config: Any, build_model: Any, attention: str
) -> None:
    config = build_config(
        loss={"type": "decoupled_ppo", "rejection": {"upper": 1000.0}},
        trainer={"lr": RATE, "grad_clip": 1e9},
        **ALL_ON,
    )
    theirs, ours = build_model(1), build_model(1)
    batch = batch_of(ours, random.Random(2), samples=5, pairs=3)
    step = OptimizerStep(
        ours, None, config, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=RATE)]
    )
    teacher = TeacherModel(ours, config.sdpo, 4096, follows=True)
    expected = step.run(batch, InlineSource(teacher, config.sdpo, batch.version))
    places = {one.trace_id: place for place, one in enumerate(batch.samples)}
    views: dict[int, list[Any]] = {}
    for view in batch.views:
        views.setdefault(places[view.trace_id], []).append(view)
    channels = ArealChannels(
        alpha=config.sdpo.alpha,
        beta=config.replay.beta,
        ppo={"rejection_sampling": {"upper": 1000.0}},
    )
    engine = FakeEngine(theirs, RATE, attention)
    rows = [row_of(theirs, one) for one in batch.samples]
    found = areal_step(engine, rows, views, batch.pairs, channels)
    for name in ("loss/policy", "loss/sdpo", "loss/replay", "loss/total"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
        assert found[name] != 0
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    every = len(batch.views) + 2 * 2 * len(batch.pairs) + len(rows)
    assert engine.forwards == (every if attention == "sdpa" else pytest.approx(every / 2, abs=2))


def test_pairs_without_a_reference_are_refused(alone: None, build_model: Any) -> None:
    model = build_model(1)
    (pair, *_) = batch_of(model, random.Random(2), samples=2, pairs=1).pairs
    bare = dataclasses.replace(pair, reference=None)
    with pytest.raises(ValueError, match="no reference log-probs"):
        areal_step(FakeEngine(model, RATE), [], {}, [bare], ArealChannels(beta=0.1))


PAGE = Guide.read("areal.md")
THEIRS = {"max_new_tokens", "turn_discount", "max_turns", "n_samples", "train_batch"}
THEIRS |= set(RECORDED["functions"]) | set(RECORDED["functions"]["ppo_actor_loss_fn"])


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - THEIRS == set()


def test_the_settings_of_the_page_are_a_run() -> None:
    (block,) = PAGE.blocks("toml")
    assert (
        as_a_run(block).rollouts.workflow == "composer_mesh.plugins.frameworks.areal:ArealWorkflow"
    )


def test_the_step_of_the_page_runs(build_model: Any) -> None:
    model = build_model(1)
    batch = batch_of(model, random.Random(2), samples=3, pairs=2)
    found: dict[str, Any] = {
        "engine": FakeEngine(model, 0.05),
        "rows": [row_of(model, one) for one in batch.samples],
        "views": {1: [one for one in batch.views if one.trace_id == "t1"]},
        "pairs": batch.pairs,
    }
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for block in PAGE.blocks("python"):
            exec(block, found)
    finally:
        dist.destroy_process_group()
    assert found["figures"]["loss/sdpo"] > 0
