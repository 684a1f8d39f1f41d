"""docs/verl.md: its steps run, its agent loop loads, its names exist."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from fake_verl import RECORDED, FakeEngine, actor_config
from guides import Guide, names_in_code
from step_batches import batch_of

import composer_mesh.plugins.frameworks.verl.plugin  # noqa: F401 - as `import verl` does
from composer_mesh.plugins.frameworks.verl.agent_loop import TaskAgentLoop

PAGE = Guide.read("verl.md")
THEIRS = {"adv_estimator", "actor_rollout_ref", "policy_loss", "default_agent_loop", "train_files"}
THEIRS |= {"agent_loop_config_path", "reward_score", "compute_topk_loss", "train_batch"}
THEIRS |= {"compute_advantage", "non_tensor_batch", "pad_to_length", "loss_agg_mode", "loss_mode"}
THEIRS |= set(RECORDED["functions"])


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - THEIRS == set()


def test_the_agent_loop_of_the_page_takes_its_keys(tokenizer: Any, write_module: Any) -> None:
    write_module("my_package", "")
    (block,) = PAGE.blocks("yaml")
    (entry,) = yaml.safe_load(block)
    assert entry.pop("_target_") == f"{TaskAgentLoop.__module__}.{TaskAgentLoop.__qualname__}"
    assert entry.pop("name") == "composer_mesh"
    rollout = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace()))
    own = {**entry, "task": "toolbox", "options": {}}
    loop = TaskAgentLoop(SimpleNamespace(config=rollout), None, tokenizer, None, None, None, **own)
    assert loop._task.settings.max_turns == 6
    own["settings"] = {"no_such_setting": 1}
    with pytest.raises(TypeError, match="setting"):
        TaskAgentLoop(SimpleNamespace(config=rollout), None, tokenizer, None, None, None, **own)


def test_the_steps_of_the_page_run(build_model: Any) -> None:
    model = build_model(1)
    batch = batch_of(model, random.Random(2), samples=2, pairs=2)
    ids = batch.samples[1].ids
    view = next(one for one in batch.views if one.trace_id == "t1")
    names = ("turn", "teacher_ids", "student_rows", "teacher_rows", "targets")
    count = len(ids) - 1
    padded = {
        "prompts": torch.tensor([ids[:1]]),
        "responses": torch.tensor([ids[1:]]),
        "attention_mask": torch.ones(1, len(ids)),
        "response_mask": torch.ones(1, count),
        "old_log_probs": torch.full((1, count), -3.0),
        "advantages": torch.ones(1, count),
    }
    fields = [[{name: getattr(view, name) for name in names}]]
    found: dict[str, Any] = {
        "engine": FakeEngine(model, 0.05),
        "data": SimpleNamespace(batch=padded, non_tensor_batch={"hint_views": fields}),
        "pairs": batch.pairs,
        "actor": actor_config(),
    }
    rows, step, alone = PAGE.blocks("python")
    exec(rows, found)
    assert len(found["rows"]) == 800
    exec(step, found)
    assert found["figures"]["loss/sdpo"] > 0
    exec(alone, found)
    assert found["figures"]["loss/replay"] > 0
