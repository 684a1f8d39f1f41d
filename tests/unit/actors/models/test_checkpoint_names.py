"""Weights go to vLLM and into checkpoints under the names of the checkpoint that was given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import MIXTURES, family_folder, family_model
from repetition import repeated
from safetensors.torch import load_file, save_file
from step_batches import batch_of
from stepped import Plain
from torch import Tensor

from composer_mesh.actors.engines.vllm_weights import VllmWeights
from composer_mesh.actors.engines.vllm_worker import HAS_HEAD
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import CheckpointNames, load_model
from composer_mesh.actors.models.ranks import Ranks

EVERY = (*MIXTURES, "qwen3", "granitemoe")
"""Mixtures, a model that needs no conversion, and one whose tensors are only renamed."""


def published(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """What vLLM's workers are given of a trainer's weights."""
    received: list[dict[str, Tensor]] = []
    named: dict[int, list[str]] = {}
    export = learner.export()
    for name, tensor in export.items():
        named.setdefault(id(tensor), []).append(name)
    weights = Plain(1, {tuple(names): export[names[0]] for names in named.values()})
    names = CheckpointNames(folder)

    def call(method: str, *, kwargs: dict[str, Any]) -> list[bool]:
        if method == HAS_HEAD:
            return [True]
        received.append(dict(kwargs["weights_iterator"]))
        return []

    tied = "lm_head.weight" in {name for names in named.values() for name in names[1:]}
    VllmWeights(call, names.expected, tied, here=True, converted=names.converted).update(weights)
    return received[0]


@pytest.mark.parametrize("family", repeated(EVERY, 3))
def test_vllm_and_checkpoints_get_exactly_what_save_pretrained_writes(
    family: str, build_config: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = family_folder(family, tokenizer, tmp_path / "policy")
    learner = Learner(build_config(trainer={"lr": 1e-3}), folder, Ranks())
    learner.train(batch_of(load_model(folder), random.Random(0)), None)
    found = published(learner, folder)
    learner.model.save_pretrained(tmp_path / "saved")
    learner.copy()
    learner.write(tmp_path / "step-1")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(load_file(folder / "model.safetensors"))
    assert set(found) - set(saved) <= {"lm_head.weight"}
    checkpoint = load_file(tmp_path / "step-1" / "model.safetensors")
    assert set(checkpoint) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(checkpoint[name], tensor), name
    again = load_model(tmp_path / "step-1").state_dict()
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_experts_have_a_name_each_where_the_checkpoint_names_them(
    tokenizer: Any, tmp_path: Path
) -> None:
    folder = family_folder("qwen3_moe", tokenizer, tmp_path)
    names = CheckpointNames(folder)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names.expected
    assert not any("gate_up_proj" in name for name in names.expected)


def test_only_one_layer_of_tensors_is_held_at_a_time(tokenizer: Any, tmp_path: Path) -> None:
    folder = family_folder("qwen3_moe", tokenizer, tmp_path)
    given: list[str] = []
    state = family_model("qwen3_moe", tokenizer).state_dict()

    def tensors() -> Any:
        for name, tensor in state.items():
            given.append(name)
            yield (name,), tensor

    for name, _ in CheckpointNames(folder).converted(tensors()):
        if name.startswith("model.layers.0."):
            assert not any(one.startswith("model.layers.1.") for one in given[:-1])


def changed(folder: Path, change: Any) -> list[str]:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return list(CheckpointNames(folder).differences())


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def test_files_that_do_not_hold_the_model_are_told(tokenizer: Any, tmp_path: Path) -> None:
    folder = family_folder("qwen3_moe", tokenizer, tmp_path)
    assert list(CheckpointNames(folder).differences()) == []
    norm = "model.layers.1.input_layernorm.weight"
    (told,) = changed(folder, lambda weights: weights.update({norm: torch.ones(3)}))
    assert told == f"{norm} is [3] but [32] there"
    (told,) = changed(folder, lambda weights: weights.pop(norm))
    assert told == f"{norm} is missing"
    weights = {norm: torch.ones(32), "score.weight": torch.ones(3)}
    (told,) = changed(folder, lambda held: held.update(weights))
    assert told == "score.weight is unknown there"


def test_a_single_expert_that_is_missing_is_told(tokenizer: Any, tmp_path: Path) -> None:
    folder = family_folder("qwen3_moe", tokenizer, tmp_path)
    assert changed(folder, lambda weights: weights.pop(EXPERT))
