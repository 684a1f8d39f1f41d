"""A trainer backend of the user's own: what it may change, what holds for it, what is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repetition import repeated
from repository import ROOT
from step_batches import batch_of, weights_of

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.backend import check_backend, make_backend
from composer_mesh.actors.models.expert_parallel import ContextGroup, ExpertGroup
from composer_mesh.actors.models.optimizer_state import UnsupportedState
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.configs.base import CustomFunction
from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.services.checks.accepting import check_custom_functions

OWN = "composer_mesh:TorchBackend"
USERS = '''
import torch
from composer_mesh import TorchBackend
from composer_mesh.actors.models.policy import load_model


class With(TorchBackend):
    def __init__(self, context, optimizer, **options):
        super().__init__(context)
        self.make = lambda weights: getattr(torch.optim, optimizer)(weights, **options)

    def optimizers(self, weights):
        return [self.make(list(weights.values()))]


class Scaled(TorchBackend):
    """Trains one factor of the final norm, which is published as the norm's weight."""

    def model(self, folder):
        model = super().model(folder).requires_grad_(False)
        norm = model.base_model.norm
        norm.factor = torch.nn.Parameter(torch.ones(1))
        norm.register_forward_hook(lambda norm, _, output: output * norm.factor)
        return model

    def published(self, model):
        found = super().published(model)
        factor = found.pop("model.norm.factor")
        found["model.norm.weight"] = found["model.norm.weight"] * factor
        return found

    def adapters(self, model):
        return {"factor": model.base_model.norm.factor.detach()}


class Kept(Scaled):
    def adapters(self, model):
        return {}


class Frozen(TorchBackend):
    def model(self, folder):
        return super().model(folder).requires_grad_(False)


class NoModel(TorchBackend):
    def model(self, folder):
        return torch.nn.Linear(2, 2)


class Raises(TorchBackend):
    def model(self, folder):
        return 1 / 0


class Whole(TorchBackend):
    def model(self, folder):
        return load_model(folder)


class Half(TorchBackend):
    def optimizers(self, weights):
        return [torch.optim.SGD(list(weights.values())[1:])]


class Twice(TorchBackend):
    def optimizers(self, weights):
        return [torch.optim.SGD(list(weights.values())) for _ in range(2)]


class NoList(TorchBackend):
    def optimizers(self, weights):
        return torch.optim.SGD(list(weights.values()))


class Silent(TorchBackend):
    def published(self, model):
        found = super().published(model)
        del found["model.norm.weight"]
        return found


class Listed(TorchBackend):
    def published(self, model):
        return list(super().published(model).items())


class Halved(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["calls"] = 1


class Counting(TorchBackend):
    def optimizers(self, weights):
        return [Halved(list(weights.values()))]


def nothing(context):
    return None


class Bare:
    def __init__(self, context):
        pass
'''


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def learner(
    build_config: Any, folder: Path, write_module: Callable[[str, str], None], monkeypatch: Any
) -> Callable[..., Learner]:
    """A learner by its backend's import path and arguments."""
    write_module("users_backends", USERS)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "last_layers"))

    def build(path: str | None, **kwargs: Any) -> Learner:
        backend = None if path is None else {"import_path": path, "kwargs": kwargs}
        trainer = {"lr": 1e-2, "lr_schedule": "linear", "warmup_steps": 1, "backend": backend}
        return Learner(build_config(trainer=trainer), folder, Ranks())

    yield build  # type: ignore[misc]
    sys.modules.pop("last_layers", None)


def trained(learner: Learner, steps: int, seed: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    batches = [batch_of(learner.model, rng, samples=4) for _ in range(steps)]
    return [learner.train(replace(one, step=learner.version), None) for one in batches]


def saved(learner: Learner, folder: Path) -> Path:
    learner.copy()
    learner.write(folder)
    return folder


def same(one: Learner, other: Learner) -> bool:
    """Whether two learners publish the same tensors, bit for bit."""
    own, theirs = one.export(), other.export()
    return own.keys() == theirs.keys() and all(own[name].equal(theirs[name]) for name in own)


def test_the_default_backend_is_what_a_users_import_path_gives(learner: Any) -> None:
    one, other = learner(None), learner(OWN)
    assert trained(one, 2) == trained(other, 2)
    assert same(one, other)


def test_the_examples_backend_trains_the_last_layer_alone(learner: Any, folder: Path) -> None:
    before = weights_of(load_model(folder))
    one = learner("last_layers:LastLayers", muon_rate=3.0)
    trained(one, 2)
    changed = {name for name, each in weights_of(one.model).items() if not each.equal(before[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)
    assert one.export().keys() == learner(None).export().keys()


def test_the_rate_of_each_group_follows_the_schedule(learner: Any) -> None:
    one = learner("last_layers:LastLayers", muon_rate=3.0)
    for metrics in trained(one, 2):
        muon, adamw = one.step._update._optimizers
        assert adamw.param_groups[0]["lr"] == pytest.approx(metrics["policy/lr"])
        assert muon.param_groups[0]["lr"] == pytest.approx(3 * metrics["policy/lr"])


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "example": ("last_layers:LastLayers", {}),
    "own adapters": ("users_backends:Scaled", {}),
    "SGD": ("users_backends:With", {"optimizer": "SGD", "lr": 0.01, "momentum": 0.9}),
    "Adafactor": ("users_backends:With", {"optimizer": "Adafactor", "lr": 0.01}),
    "NAdam": ("users_backends:With", {"optimizer": "NAdam", "lr": 0.01}),
    "Adagrad": ("users_backends:With", {"optimizer": "Adagrad", "lr": 0.01}),
    "ASGD": ("users_backends:With", {"optimizer": "ASGD", "lr": 0.01}),
}


@pytest.mark.parametrize("name", repeated(RESUMED, 3))
def test_a_resumed_run_of_any_backend_goes_on_bit_for_bit(
    learner: Any, name: str, tmp_path: Path
) -> None:
    path, kwargs = RESUMED[name]
    one = learner(path, **kwargs)
    trained(one, 2)
    checkpoint = saved(one, tmp_path / "step-2")
    other = learner(path, **kwargs)
    other.restore(checkpoint)
    assert same(one, other)
    assert trained(one, 1, seed=2) == trained(other, 1, seed=2)
    assert same(one, other)


def test_what_an_own_adapter_learns_is_published_and_written_as_a_model_folder(
    learner: Any, tmp_path: Path
) -> None:
    one = learner("users_backends:Scaled")
    trained(one, 2)
    model = load_model(saved(one, tmp_path / "step-2"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, one.model(ids).logits)
    assert one.model.base_model.norm.factor.item() != 1


REFUSED = {
    "Frozen": "model: no parameter of its model requires a gradient: leave some",
    "NoModel": "model: it returned a Linear without 'base_model': return a causal LM",
    "Raises": "model: it raised ZeroDivisionError",
    "Half": r"optimizers: .* is in 0 of its optimizers' groups but must be in one: give",
    "Twice": r"optimizers: .* is in 2 of its optimizers' groups but must be in one: give",
    "NoList": "optimizers: it returned a SGD: return a list",
    "Silent": r"published: its published model.norm.weight is nothing but must be \(32,\)",
    "Listed": "published: it returned a list that is not a dict of tensors by name",
    "Kept": "adapters: it publishes other tensors than the model's own and has no adapters",
    "nothing": "it made a NoneType without the methods model, optimizers",
    "Bare": "it has no method 'model': derive it from composer_mesh.TorchBackend",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_that_cannot_be_trained_is_refused_when_it_is_loaded(
    learner: Any, name: str
) -> None:
    with pytest.raises(CustomFunctionError, match=REFUSED[name]) as refused:
        learner(f"users_backends:{name}")
    assert f"custom function 'users_backends:{name}'" in str(refused.value)


@pytest.mark.parametrize(
    ("place", "group"),
    [("context", ContextGroup(0, 2, None)), ("experts", ExpertGroup(2, 1, None, None))],
)
def test_a_backend_that_does_not_divide_its_model_among_ranks_is_refused(
    learner: Any, build_config: Any, folder: Path, place: str, group: Any
) -> None:
    learner("users_backends:Whole")  # without groups it may be whole
    backend = {"import_path": "users_backends:Whole"}
    ranks = Ranks()
    setattr(ranks, place, group)
    told = f"model: its model is not divided among ranks as trainer.{place.rstrip('s')}_parallel"
    with pytest.raises(CustomFunctionError, match=told):
        make_backend(build_config(trainer={"backend": backend}), ranks).model(folder)


def test_state_that_no_checkpoint_can_hold_is_refused_after_the_first_step(learner: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"Halved keeps 'calls' as a int, but checkpoints"):
        trained(learner("users_backends:Counting"), 1)


def test_a_backend_is_checked_without_being_made(
    write_module: Callable[[str, str], None],
) -> None:
    write_module("users_backends", USERS)
    check_backend(CustomFunction(import_path="users_backends:Raises"))
    told = r"called with \(context, wrong=1\) but takes .*one positional argument, the context"
    with pytest.raises(CustomFunctionError, match=told):
        check_backend(CustomFunction(import_path="users_backends:Raises", kwargs={"wrong": 1}))


def test_check_refuses_a_backend_and_a_loss_that_no_run_could_use(
    write_module: Callable[[str, str], None], build_config: Any
) -> None:
    needy = (
        "from composer_mesh import loss_needs\n\n\n@loss_needs('logits')\ndef loss(inputs): ...\n"
    )
    write_module("users_backends", USERS + needy)
    backend = build_config(trainer={"backend": {"import_path": "users_backends.Bare"}})
    with pytest.raises(CustomFunctionError, match=REFUSED["Bare"]):
        check_custom_functions(backend)
    loss = build_config(loss={"type": "custom", "import_path": "users_backends.loss"})
    with pytest.raises(
        CustomFunctionError, match=r'needs logits .* set loss.needs to \["logits"\]'
    ):
        check_custom_functions(loss)
    check_custom_functions(build_config(trainer={"backend": {"import_path": OWN}}))
