"""Losses compared with stored results of the published code, in a dtype and on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.losses import advantages, distillation, policy, preference
from composer_mesh.losses.policy import Rejection, sampling_weights, token_kl

UPSTREAM = Path(__file__).parent.parent / "losses" / "upstream"
TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (5e-5, 2e-6)}
OF_THE_BATCH = ("reference_logprobs", "sampling_weights", "old_logprobs")
CPU = torch.device("cpu")


def stored(family: str) -> dict[str, Any]:
    """The content of a family's file."""
    found: dict[str, Any] = json.loads((UPSTREAM / f"{family}.json").read_text(encoding="utf-8"))
    return found


POLICY = stored("policy")
DISTILLATION = stored("distillation")


def distillation_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each case with the group that names its function and tolerance."""
    return [(group, case) for group in DISTILLATION["losses"] for case in group["cases"]]


def check_policy(case: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> None:
    batch = _batch(case["batch"], dtype, device)
    options = {
        name: batch[value] if name in OF_THE_BATCH else value
        for name, value in case["options"].items()
    }
    if options.get("rejection") is not None:
        options["rejection"] = Rejection(**options["rejection"])
    if case["function"] == "grpo_loss":
        options.setdefault("clip_high", 0.2)  # the published code's own default
    arguments = [batch[name] for name in case["arguments"]]
    found = getattr(policy, case["function"])(*arguments, **options).loss
    found.backward()
    _compare(found, case["loss"], dtype, device)
    _compare(batch["logprobs"].grad, case["gradient"], dtype, device)


def check_weights(case: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> None:
    batch = _batch(case["batch"], dtype, device)
    found = sampling_weights(batch["old"], batch["sampling"], batch["mask"], **case["options"])
    _compare(found, case["weights"], dtype, device)


def check_kl(case: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> None:
    batch = _batch(case["batch"], dtype, device)
    found = token_kl(batch["logprobs"], batch["reference"], batch["mask"], **case["options"])
    found.sum().backward()
    _compare(found, case["kl"], dtype, device)
    _compare(batch["logprobs"].grad, case["gradient"], dtype, device)


def check_advantages(case: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> None:
    inputs = {name: _tensor(values, dtype, device) for name, values in case["inputs"].items()}
    found = getattr(advantages, case["function"])(**inputs, **case["settings"])
    _compare(found, case["expected"], dtype, device)


def check_preference(case: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU) -> None:
    inputs = {name: _tensor(values, dtype, device) for name, values in case["inputs"].items()}
    answers = {name: inputs[name].requires_grad_() for name in ("chosen", "rejected")}
    result = getattr(preference, case["function"])(**inputs, **case["settings"])
    gradients = torch.autograd.grad(result.loss, list(answers.values()))
    _compare(result.loss, case["loss"], dtype, device)
    for found, name in zip(gradients, answers, strict=True):
        _compare(found, case["gradients"][name], dtype, device)
    for name, value in case.get("rewards", {}).items():
        _compare(getattr(result, name), value, dtype, device)


def check_distillation(
    group: dict[str, Any], case: dict[str, Any], dtype: torch.dtype, device: torch.device = CPU
) -> None:
    arguments = {
        name: _tensor(value, dtype, device) if isinstance(value, list) else value
        for name, value in case["arguments"].items()
    }
    for name in case["gradients"]:
        arguments[name].requires_grad_()
    loss = getattr(distillation, group["function"])(**arguments)
    loss.backward()
    tolerance = group["tolerance"] if dtype == torch.float64 else TOLERANCES[dtype]
    _compare(loss, case["loss"], dtype, device, tolerance)
    for name, expected in case["gradients"].items():
        _compare(arguments[name].grad, expected, dtype, device, tolerance)


def _batch(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    stored_batch = POLICY["batches"][name].items()
    found = {key: _tensor(value, dtype, device) for key, value in stored_batch}
    found["logprobs"].requires_grad_()
    return found


def _tensor(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the dtype, or of counts and masks as they are; null is NaN."""
    values = _nan_for_null(values)
    found = torch.tensor(values)
    return (torch.tensor(values, dtype=dtype) if found.is_floating_point() else found).to(device)


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan_for_null(one) for one in value]
    return float("nan") if value is None else value


def _compare(
    found: Tensor | None,
    expected: Any,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: tuple[float, float] | None = None,
) -> None:
    assert found is not None
    assert found.device.type == device.type
    rtol, atol = tolerance or TOLERANCES[dtype]
    wanted = torch.tensor(expected, dtype=dtype)
    torch.testing.assert_close(found.detach().cpu(), wanted, rtol=rtol, atol=atol)
