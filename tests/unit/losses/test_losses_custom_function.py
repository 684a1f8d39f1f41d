"""Custom functions: found by path, checked before they run, and a PRIME-RL user's file as it is."""

import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raised_kinds import NAMES, raised

from composer_mesh.losses.custom import (
    CustomFunctionError,
    LossInputs,
    LossOutputs,
    check_signature,
    custom_policy_loss,
    load_function,
)

NAME = "my_module.my_loss"


def scaled(inputs: LossInputs, scale: float = 1.0) -> LossOutputs:
    return LossOutputs(-scale * inputs.trainer_logprobs.sum())


def sequences() -> list[LossInputs]:
    policy = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    sampling, advantages = torch.tensor([-1.2, -1.0, -0.5]), torch.tensor([1.0, -1.0, 0.5])
    return [LossInputs(policy, sampling, None, advantages, torch.tensor([True, True, False]))]


@pytest.mark.parametrize(
    ("function", "kwargs", "problem"),
    [
        (scaled, {"scael": 1}, "unexpected keyword argument 'scael'"),
        (lambda: None, {}, "too many positional arguments"),
        (lambda inputs, eps: None, {}, "missing a required argument: 'eps'"),
        (lambda *, inputs: None, {}, "too many positional arguments"),
    ],
)
def test_a_signature_that_does_not_fit_is_an_error_before_anything_runs(
    function: Callable[..., Any], kwargs: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CustomFunctionError, match=rf"'my_module.my_loss': .*{problem}"):
        custom_policy_loss(function, NAME, kwargs, [], normalizer=1)


def test_a_coroutine_function_is_refused_and_a_function_without_signature_is_not() -> None:
    async def later(inputs: LossInputs) -> None: ...

    with pytest.raises(CustomFunctionError, match="it is a coroutine function"):
        check_signature(later, NAME, {})
    check_signature(dict.fromkeys, NAME, {})


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"KeyboardInterrupt"}))
def test_whatever_a_function_raises_is_an_error_that_names_it(name: str) -> None:
    def fails(inputs: LossInputs) -> LossOutputs:
        raise raised(name)

    with pytest.raises(CustomFunctionError, match=rf"my_loss.*it raised {name}: .*of the user"):
        custom_policy_loss(fails, NAME, {}, sequences(), normalizer=1)


def test_ctrl_c_ends_a_command_that_runs_a_function_in_its_main_thread() -> None:
    def interrupted(inputs: LossInputs) -> LossOutputs:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        custom_policy_loss(interrupted, NAME, {}, sequences(), normalizer=1)


def test_the_error_survives_pickling() -> None:
    error = CustomFunctionError(NAME, "sequence 3", "its loss is nan")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.args) == (str(error), error.args)
    assert isinstance(again, ValueError)


USERS_MODULE = """
import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs
from prime_rl.orchestrator.advantage import AdvantageInputs, AdvantageOutputs

SCALE = 2.0

def clipped(inputs: LossInputs, clip_eps: float = 0.2) -> LossOutputs:
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    bounded = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    gain = torch.min(ratio * inputs.advantages, bounded * inputs.advantages)
    outside = (ratio != bounded)[inputs.loss_mask].float().mean()
    return LossOutputs(loss=-gain[inputs.loss_mask].sum(), metrics={"outside": outside})

class Losses:
    @staticmethod
    def nested(inputs):
        return clipped(inputs)
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "a_users_losses"
    (tmp_path / f"{name}.py").write_text(USERS_MODULE)
    (tmp_path / "a_broken_module.py").write_text("1 / 0")
    (tmp_path / "a_deep_user.py").write_text("from prime_rl.trainer.rl.loss import compute_loss")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, "a_broken_module", "a_deep_user"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return name


def test_a_prime_rl_users_file_runs_unchanged_without_prime_rl(users_module: str) -> None:
    path = f"{users_module}.clipped"
    loss, metrics = custom_policy_loss(
        load_function(path), path, {"clip_eps": 0.1}, sequences(), normalizer=8
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert 0 <= metrics["outside"].mean <= 1
    assert not [module for module in sys.modules if module.split(".")[0] == "prime_rl"]


def test_a_function_is_found_by_dots_by_a_colon_or_in_a_file(users_module: str) -> None:
    by_dots = load_function(f"{users_module}.clipped")
    assert load_function(f"{users_module}:clipped") is by_dots
    file = sys.modules[users_module].__file__
    assert load_function(f"{file}:clipped").__code__.co_filename == file
    assert load_function(f"{users_module}:Losses.nested")(sequences()[0]).loss.shape == ()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "it is not an import path: write my_module.my_name, my_module:my_name or"),
        ("clipped", "it is not an import path"),
        ("a b.c", "it is not an import path"),
        ("no_such_module.f", "there is no module 'no_such_module': install it, or name its folder"),
        ("a_users_losses.cliped", "'a_users_losses' has no 'cliped': did you mean 'clipped'?"),
        ("a_users_losses.zzz", "'a_users_losses' has no 'zzz': check the spelling"),
        ("a_users_losses.SCALE", "it is of type float: name a function instead"),
        ("a_broken_module.f", "importing it raised ZeroDivisionError"),
        ("a_deep_user.f", "cannot import name 'compute_loss'.*prime-rl is not installed and only"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_that_names_it(
    users_module: str, path: str, problem: str
) -> None:
    with pytest.raises(CustomFunctionError, match=f"custom function '{path}': .*{problem}"):
        load_function(path)
