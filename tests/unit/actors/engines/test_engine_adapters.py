"""Generators that get adapters alone serve what the trainer computes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import ask, assert_faithful, serve
from pydantic import ValidationError
from step_batches import batch_of
from torch import Tensor

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.actors.engines.port import make_engine
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.mesh.weights.manifest import Entry, WeightManifest, WeightsMismatch

LORA = {"rank": 4, "sync": "adapters"}

pytest.importorskip("peft", exc_type=ModuleNotFoundError)


@dataclass(frozen=True)
class Published:
    """Tensors of a version, that fill what a manifest of them finds in a model."""

    version: int
    state: dict[str, Tensor]

    @property
    def manifest(self) -> WeightManifest:
        found = ((name, one) for name, one in self.state.items())
        return WeightManifest(
            tuple(Entry((name,), tuple(one.shape), one.dtype) for name, one in found)
        )

    @torch.no_grad()
    def apply(self, model: Any, rate: float = 1.0) -> None:
        for places, one in zip(self.manifest.places(model), self.state.values(), strict=True):
            for place in places:
                place.copy_(one)

    def tensors(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def test_an_engine_that_gets_adapters_alone_serves_the_trained_policy(
    folder: Path, build_config: Any
) -> None:
    config = build_config(trainer={"lora": LORA, "lr": 1e-2}, policy={"path": folder})
    learner, engine = Learner(config, folder, Ranks()), make_engine(config, folder)
    assert isinstance(engine, Engine)
    learner.train(batch_of(load_model(folder), random.Random(0)), None)
    published = learner.published()
    assert all(".lora_" in name for name in published)
    moved = sum(one.nbytes for one in published.values())
    assert moved < 0.2 * sum(one.nbytes for one in learner.export().values())
    engine.swap(Published(1, published))
    merged = load_model(folder)
    merged.load_state_dict(learner.export())
    asked = ask("one", [5, 6, 7, 8], new=20)
    result = serve(engine, [asked])["one"]
    assert result.versions == [1] * len(result.token_ids)
    assert_faithful(merged, asked, result)


def test_adapters_of_another_rank_and_missing_ones_are_refused(
    folder: Path, build_config: Any
) -> None:
    config = build_config(trainer={"lora": LORA}, policy={"path": folder})
    published = Learner(config, folder, Ranks()).published()
    other = build_config(trainer={"lora": {**LORA, "rank": 2}}, policy={"path": folder})
    engine = make_engine(other, folder)
    with pytest.raises(WeightsMismatch, match="lora_A"):
        engine.swap(Published(1, published))
    first = next(iter(published))
    published.pop(first)
    with pytest.raises(WeightsMismatch, match=f"{first} is missing in the published weights"):
        make_engine(config, folder).swap(Published(1, published))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"sdpo": {"alpha": 0.1}}, "but sdpo.placement is of a kind that takes whole weights"),
    ],
)
def test_receivers_of_whole_weights_are_refused(
    sections: dict[str, Any], why: str, build_config: Any
) -> None:
    with pytest.raises(ValidationError, match=why):
        build_config(trainer={"lora": LORA}, **sections)
