"""docs/areal.md: its step runs, its settings parse, its names exist."""

import random
from typing import Any

import torch.distributed as dist
from fake_areal import RECORDED, FakeEngine, row_of
from guides import Guide, as_a_run, names_in_code
from step_batches import batch_of

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
