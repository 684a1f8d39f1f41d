"""A custom loss and advantage are called on examples before a run: what is refused, and how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.configs.user_code import CustomFunctionError, where_of
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.services.steps.custom_function_program import ImportedFunction
from composer_mesh.services.steps.custom_functions import try_custom_functions

LOSSES = """
import torch
from composer_mesh import LossInputs, LossOutputs, loss_needs

def right(inputs):
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    return LossOutputs(loss=-(inputs.loss_mask * inputs.advantages * ratio).sum())

@loss_needs("entropies", "logits", "hidden_states")
def needy(inputs):
    assert inputs.ref_logprobs.shape == inputs.loss_mask.shape
    assert inputs.entropies.shape == (inputs.loss_mask.sum(),)
    assert len(inputs.hidden_states) == len(inputs.logits)
    best = inputs.logits.log_softmax(-1)[:, 0]
    assert torch.equal(best, inputs.trainer_logprobs[inputs.loss_mask])
    return LossOutputs(loss=inputs.hidden_states.sum() + inputs.entropies.sum())

def shape(inputs):
    return LossOutputs(loss=(inputs.trainer_logprobs * inputs.advantages[:-1]).sum())

def nothing(inputs):
    inputs.trainer_logprobs.sum()

def misspelled(inputs):
    return LossOutputs(loss=inputs.trainer_logprob.sum())

def many(inputs):
    return LossOutputs(loss=inputs.trainer_logprobs)

def gradient(inputs):
    return LossOutputs(loss=(0 * inputs.trainer_logprobs).sum().sqrt())

def absent(inputs):
    return LossOutputs(loss=(inputs.trainer_logprobs - inputs.ref_logprobs).sum())

def endless(inputs):
    while True:
        pass

def ends(inputs):
    import os
    os._exit(3)
"""
ADVANTAGES = """
import torch
from composer_mesh import AdvantageInputs, AdvantageOutputs

def rewards(inputs):
    return torch.tensor([[one["reward"] for one in group] for group in inputs.rollouts])

def right(inputs):
    found = rewards(inputs)
    return AdvantageOutputs(found - found.mean(-1, keepdim=True))

def shape(inputs):
    return AdvantageOutputs(rewards(inputs).flatten())

def nothing(inputs):
    rewards(inputs)

def misspelled(inputs):
    return AdvantageOutputs(torch.tensor([[one["rewards"] for one in inputs.rollouts[0]]]))

def raises(inputs):
    raise ValueError("of the user")

def flat(inputs):
    found = rewards(inputs)
    return AdvantageOutputs((found - found.mean(-1, keepdim=True)) / found.std(-1, keepdim=True))
"""
Build = Callable[..., Config]


@pytest.fixture(autouse=True)
def modules(
    write_module: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module("tried_losses", LOSSES)
    write_module("tried_advantages", ADVANTAGES)
    monkeypatch.setenv(IMPORT_PATHS, str(tmp_path))


def try_here(config: Config) -> None:
    """Call the functions in this process."""
    try_custom_functions(config, lambda _path, _limit_s: ImportedFunction())


def loss(name: str, **options: Any) -> dict[str, Any]:
    return {"loss": {"type": "custom", "import_path": f"tried_losses.{name}", **options}}


def advantage(name: str) -> dict[str, Any]:
    return {"advantage": {"type": "custom", "import_path": f"tried_advantages.{name}"}}


NEEDS = ["entropies", "logits", "hidden_states"]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        loss("right"),
        loss("needy", needs=NEEDS, reference=True),
        loss("absent", reference=True),
        advantage("right"),
        advantage("flat") | {"schedule": {"dynamic_sampling": True}},
    ],
)
def test_a_function_that_a_run_can_use_passes(build_config: Build, sections: Any) -> None:
    try_here(build_config(**sections))


@pytest.mark.parametrize(
    ("sections", "line", "said"),
    [
        (loss("shape"), "inputs.advantages[:-1]", r"RuntimeError.*have trainer_logprobs \[9\]"),
        (loss("nothing"), "def nothing", r"returned None without 'loss': return LossOutputs"),
        (loss("misspelled"), "inputs.trainer_logprob.", "did you mean 'trainer_logprobs'"),
        (loss("many"), "def many", r"shape \(9,\) but must be a scalar: return its sum"),
        (loss("gradient"), "def gradient", "gradient is not: mask before"),
        (loss("absent"), "inputs.ref_logprobs", "TypeError"),
        (advantage("shape"), "def shape", r"shape \(\d+,\) but the rewards \(3, \d\)"),
        (advantage("nothing"), "def nothing", "returned None without 'advantages'"),
        (advantage("misspelled"), '["rewards"]', "did you mean 'reward'.*'completion_len'"),
        (advantage("raises"), 'ValueError("of the user")', "it raised ValueError: of the user"),
        (advantage("flat"), "def flat", r"prompt 2, .* is nan .* standard deviation of 0"),
    ],
)
def test_what_a_run_could_not_use_is_refused_with_its_line_and_the_repair(
    build_config: Build, sections: Any, line: str, said: str
) -> None:
    with pytest.raises(CustomFunctionError, match=said) as refused:
        try_here(build_config(**sections))
    assert line in refused.value.frame
    assert where_of(refused.value.frame) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "limit_s", "said"),
    [("endless", 1.0, "did not return within 1 s"), ("ends", 60.0, "status 3")],
)
def test_a_function_that_never_returns_or_ends_its_process_is_refused(
    build_config: Build, name: str, limit_s: float, said: str
) -> None:
    config = build_config(**loss(name), supervision={"custom_function_s": limit_s})
    with pytest.raises(CustomFunctionError, match=rf"'tried_losses\.{name}'.*{said}"):
        try_custom_functions(config)
