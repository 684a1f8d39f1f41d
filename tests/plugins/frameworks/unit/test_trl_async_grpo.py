"""The mesh behind TRL's two protocols: the order of calls, what it refuses, which weights fit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.configs.schema import Config
from composer_mesh.configs.tracking import TensorboardTracking
from composer_mesh.plugins.frameworks.trl.async_grpo import MeshRollouts, WeightNames
from composer_mesh.plugins.frameworks.trl.checks import rollouts_at_once

SETTINGS: dict[str, Any] = {
    "output_dir": "out",
    "num_generations": 4,
    "max_staleness": 2,
    "temperature": 1.0,
    "token_budget": 0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "world_size": 3,
    "max_inflight_tasks": -1,
    "queue_maxsize": 1024,
}


def settings(**changes: Any) -> Any:
    """What is read of TRL's AsyncGRPOConfig."""
    return SimpleNamespace(**{**SETTINGS, **changes})


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any, build_model: Any) -> Path:
    save_policy(build_model(len(tokenizer)), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def build(build_config: Any, folder: Path) -> Any:
    """The config of a run whose policy is a folder."""

    def build(**sections: Any) -> Config:
        sections["policy"] = {"max_context": 512, "path": str(folder)}
        sections.setdefault("schedule", {"group_size": 4, "max_lag": 2})
        return cast(Config, build_config(**sections))

    return build


class FakeMesh:
    """A mesh that notes its calls; `sent` are the weights of each version."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: dict[int, dict[str, Tensor]] = {}

    def send(self, state: dict[str, Tensor], version: int) -> None:
        self.calls.append("send")
        self.sent[version] = state

    def check(self, stale_after_s: float) -> None:
        self.calls.append(f"check {stale_after_s:g}")

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


class Faked(MeshRollouts):
    """Starts no processes."""

    def _start(self) -> Any:
        self.fake = FakeMesh()
        return self.fake


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_both_protocols_of_trl_have_all_their_members(build: Any) -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import (
        RolloutWorkerProtocol,
        WeightTransferProtocol,
    )

    mesh = MeshRollouts(build(), settings())
    for protocol in (RolloutWorkerProtocol, WeightTransferProtocol):
        members = {*vars(protocol), *protocol.__annotations__}
        wanted = {name for name in members if not name.startswith("_")}
        assert len(wanted) >= 5
        assert all(hasattr(mesh, name) for name in wanted)


def test_the_mesh_starts_with_the_first_weights_and_plays_once_the_trainer_begins(
    build: Any, folder: Path
) -> None:
    mesh, model = Faked(build(), settings()), load_model(folder)
    assert mesh.model == str(folder)
    mesh.init_weight_transfer()
    mesh.pause()
    mesh.send_weights(iter(model.named_parameters()))
    mesh.resume()
    mesh.update_model_version(1)
    assert mesh.fake.calls == ["send"]
    mesh.start()
    mesh.pause()
    mesh.send_weights(iter(model.named_parameters()))
    mesh.resume()
    mesh.update_model_version(2)
    mesh.check_health(300.0)
    assert mesh.fake.calls == ["send", "open", "pause", "send", "open", "check 300"]
    assert list(mesh.fake.sent) == [1, 2]
    assert mesh.rollout_buffer.model_version == 2
    mesh.stop()
    mesh.destroy()
    assert mesh.fake.calls[-1] == "close"
    assert mesh.fake.calls.count("close") == 1


def test_calls_out_of_order_say_what_to_do(build: Any, folder: Path) -> None:
    mesh = Faked(build(), settings())
    with pytest.raises(RuntimeError, match="init_weight_transfer comes before"):
        mesh.send_weights(iter(load_model(folder).named_parameters()))
    for call in (mesh.start, lambda: mesh.check_health(1.0)):
        with pytest.raises(RuntimeError, match="when weight_transfer is this MeshRollouts too"):
            call()
    with pytest.raises(RuntimeError, match=r"is at version 3 but 0 were sent: pass the same"):
        mesh.update_model_version(3)
    mesh.stop()
    with pytest.raises(RuntimeError, match="make a new MeshRollouts"):
        mesh.init_weight_transfer()


@pytest.mark.parametrize(
    ("changes", "sections", "message"),
    [
        ({"num_generations": 8}, {}, r"group_size is 4 but num_generations .* is 8: set both"),
        ({"max_staleness": 4}, {}, r"max_lag is 2 but max_staleness .* is 4: set both"),
        ({"temperature": 0.7}, {}, r"temperature is 1.0 but temperature .* is 0.7: set both"),
        (
            {"max_staleness": 0},
            {"schedule": {"group_size": 4, "max_lag": 0}},
            "max_staleness is 0, with which rollouts .* would all be dropped: set it",
        ),
        ({"token_budget": None}, {}, r"asks a vLLM server: set it to 512 or more"),
        ({"token_budget": 100}, {}, r"token_budget is 100 but policy.max_context is 512"),
        ({"max_inflight_tasks": 3}, {}, r"max_inflight_tasks is 3, but a group has 4 rollouts"),
        ({"queue_maxsize": 2}, {}, r"queue_maxsize is 2, but a group has 4 rollouts"),
        (
            {
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "world_size": 1,
            },
            {},
            r"max_staleness times the samples of a step is 2 \* 1, but a group has 4",
        ),
        ({}, {"sdpo": {"alpha": 0.1}}, "sdpo.alpha is set, but AsyncGRPOTrainer trains no hints"),
        ({}, {"advantage": {"type": "rloo"}}, "advantage is set, .* has its own: leave it out"),
        ({}, {"generator": {"top_p": 0.9}}, "generator.top_p is set, .* whole distribution"),
        ({}, {"late_rewards": {"max_age": 2}}, "late_rewards.max_age is set"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_repair(
    build: Any, changes: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MeshRollouts(build(**sections), settings(**changes))


def test_trackers_of_a_run_are_refused_as_they_would_hear_of_no_step(build: Any) -> None:
    config = build().model_copy(update={"tracking": (TensorboardTracking(type="tensorboard"),)})
    with pytest.raises(ValueError, match=r"tracking is set, .* by its own report_to: remove it"):
        MeshRollouts(config, settings())


def test_the_tightest_bound_limits_the_rollouts_at_once() -> None:
    assert rollouts_at_once(settings()) == 2 * 8 * 2 * 3
    assert rollouts_at_once(settings(max_inflight_tasks=40)) == 40
    assert rollouts_at_once(settings(queue_maxsize=24)) == 24
    assert rollouts_at_once(settings(queue_maxsize=0)) == 96


def test_weights_are_taken_by_all_names_that_generators_know(folder: Path) -> None:
    model = load_model(folder)
    found = WeightNames.of(folder).taken_from(iter(model.named_parameters()))
    assert found.keys() == model.state_dict().keys()
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    assert all(torch.equal(found[name], one) for name, one in model.state_dict().items())
    assert not any(one.requires_grad for one in found.values())


def test_weights_of_another_model_are_refused_before_anything_starts(
    build: Any, folder: Path
) -> None:
    mesh, model = Faked(build(), settings()), load_model(folder)
    mesh.init_weight_transfer()
    own = dict(model.named_parameters())
    embedding = own.pop("model.embed_tokens.weight")
    for sent, message in (
        ({"model.visual.weight": embedding}, r"sends model.visual.weight, .* does not have"),
        (
            {"model.embed_tokens.weight": embedding[:-1]},
            r"as \(\d+, 32\) but the generators'",
        ),
        (own, r"sends no model.embed_tokens.weight \(of 1 that are missing\)"),
    ):
        with pytest.raises(ValueError, match=message):
            mesh.send_weights(iter(sent.items()))
    assert not hasattr(mesh, "fake")
