"""Policy losses against values and gradients that the published code gave for the same inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses import policy
from composer_mesh.losses.policy import Rejection, sampling_weights, token_kl

GOLDEN = json.loads((Path(__file__).parent / "upstream" / "policy.json").read_text())
TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (5e-5, 2e-6)}
TENSORS = ("reference_logprobs", "sampling_weights", "old_logprobs", "token_divergences")
every_type = pytest.mark.parametrize("dtype", TOLERANCES)


def tensors(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {key: torch.tensor(value) for key, value in GOLDEN["batches"][name].items()}
    exact = {
        key: torch.tensor(value, dtype=dtype)
        for key, value in GOLDEN["batches"][name].items()
        if found[key].is_floating_point()
    }
    exact["logprobs"].requires_grad_()
    return found | exact


def options_of(case: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Any]:
    options = {
        name: batch[value] if name in TENSORS else value for name, value in case["options"].items()
    }
    if options.get("rejection") is not None:
        options["rejection"] = Rejection(**options["rejection"])
    return options


def named(case: dict[str, Any]) -> str:
    return f"{case['source'].split()[0]} {case.get('function', 'weights')} {case['batch']}"


@every_type
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=named)
def test_loss_and_gradient_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    batch = tensors(case["batch"], dtype)
    loss = getattr(policy, case["function"])
    arguments = [batch[name] for name in case["arguments"]]
    found = loss(*arguments, **options_of(case, batch)).loss
    found.backward()
    rtol, atol = TOLERANCES[dtype]
    gradient = torch.tensor(case["gradient"], dtype=dtype)
    torch.testing.assert_close(found, torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=atol)
    torch.testing.assert_close(batch["logprobs"].grad, gradient, rtol=rtol, atol=atol)


@every_type
@pytest.mark.parametrize("case", GOLDEN["weights"], ids=named)
def test_sampling_weights_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    batch = tensors(case["batch"], dtype)
    found = sampling_weights(batch["old"], batch["sampling"], batch["mask"], **case["options"])
    rtol, atol = TOLERANCES[dtype]
    expected = torch.tensor(case["weights"], dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@every_type
@pytest.mark.parametrize("case", GOLDEN["kl"], ids=lambda case: case["source"].split()[-1])
def test_kl_estimates_are_those_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    batch = tensors(case["batch"], dtype)
    found = token_kl(batch["logprobs"], batch["reference"], batch["mask"], **case["options"])
    found.sum().backward()
    rtol, atol = TOLERANCES[dtype]
    expected, gradient = (torch.tensor(case[name], dtype=dtype) for name in ("kl", "gradient"))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(batch["logprobs"].grad, gradient, rtol=rtol, atol=atol)


@every_type
@pytest.mark.parametrize("case", GOLDEN["components"], ids=lambda case: case["batch"])
def test_the_loss_by_components_is_that_of_the_published_code(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    batch = tensors(case["batch"], dtype)
    weights, shares, mask = batch["weights"], batch["divergences"], batch["mask"]
    found = policy.prime_rl_component_loss(
        batch["logprobs"],
        batch["sampling"],
        batch["token_advantages"],
        mask,
        rl_normalizer=5,
        ce_normalizer=3,
        ref_kl_normalizer=4,
        rl_weights=torch.where(shares > 0.1, weights, 0.0),
        ce_weights=weights * ~mask,
        ref_kl_weights=shares * mask,
        reference_logprobs=batch["reference"],
        mask_low=0.1,
        kl_tau=0.01,
    )
    found.loss.backward()
    rtol, atol = TOLERANCES[dtype]
    gradient = torch.tensor(case["gradient"], dtype=dtype)
    torch.testing.assert_close(
        found.loss, torch.tensor(case["loss"], dtype=dtype), rtol=rtol, atol=atol
    )
    torch.testing.assert_close(batch["logprobs"].grad, gradient, rtol=rtol, atol=atol)
