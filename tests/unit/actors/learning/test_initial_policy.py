"""Where adapters are trained, the initial policy is the trained model without them, not a copy."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from step_batches import ALL_ON, NARROW, batch_of, largest_change, weights_of

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.step import ThreeChannelStep
from composer_mesh.actors.models.lora import BaseModel
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.trained_model import frozen_model, trained_model
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import sizes_of

LORA = {"lora": {"rank": 2, "alpha": 4.0}, "lr": 1e-2}


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def config_of(build_config: Any, teacher: str, **trainer: Any) -> Any:
    sdpo = {**ALL_ON.get("sdpo", {}), "teacher": teacher, "placement": "inline"}
    return build_config(
        **{**NARROW, **ALL_ON, "sdpo": sdpo},
        loss={"type": "grpo", "kl_beta": 0.1},
        trainer={**LORA, **trainer},
    )


def known(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("teacher", ["frozen", "trust_region"])
def test_steps_are_those_of_a_reference_and_a_teacher_with_weights_of_their_own(
    build_config: Any, folder: Path, rng: random.Random, teacher: str, sharing: bool
) -> None:
    pytest.importorskip("peft", exc_type=ModuleNotFoundError)
    config = config_of(build_config, teacher, prefix_sharing=sharing)
    learner, ranks = Learner(config, folder, Ranks()), Ranks()
    model = trained_model(config, folder, ranks)
    step = ThreeChannelStep(model, frozen_model(config, folder, ranks), config, ranks)
    copied = TeacherModel(
        model,
        config.sdpo,
        config.trainer.microbatch_tokens,
        follows=True,
        copied=lambda _: frozen_model(config, folder, ranks),
        sharing=config.trainer.sharing,
    )
    for version in range(3):
        batch = replace(batch_of(model, rng), step=version)
        source = InlineSource(copied, config.sdpo, version, step.teacher_forwards(batch))
        expected = step.run(batch, source)
        copied.absorb(version + 1, lambda *_: None)
        found = learner.train(batch, learner.own_teacher_outputs(batch))
        assert known(found) == pytest.approx(known(expected), rel=1e-4, abs=1e-6)
    assert found["policy/kl_reference"] > 0
    assert largest_change(weights_of(learner.model), weights_of(model)) < 1e-6
    assert learner._teacher is not None
    assert learner._teacher.models[-1] is learner.model
    assert isinstance(learner.step._policy._reference, BaseModel)


def test_no_copy_of_the_initial_policy_is_counted_where_adapters_are_trained(
    build_config: Any,
) -> None:
    def copies(config: Any) -> int:
        parts = memory_of("trainer", config, sizes_of(config.policy)).host
        return sum(part.bytes for part in parts if part.what == "frozen copies")

    whole = config_of(build_config, "frozen", lora=None)
    one = copies(whole) // 2
    assert one > 0
    assert copies(config_of(build_config, "frozen")) == 0
    assert copies(config_of(build_config, "ema")) == one
    assert copies(config_of(build_config, "frozen", sharding="fsdp2")) == 2 * one
