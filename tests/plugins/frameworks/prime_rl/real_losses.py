"""Runs PRIME-RL's own loss module, and prints what it found as JSON.

It has its functions call ours, and ours theirs, on the same random sequences. Its files are
imported from a checkout, without PRIME-RL's other dependencies.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(os.environ["COMPOSER_MESH_PRIME_RL"])
PARTS = (SOURCE / "src", SOURCE / "packages" / "prime-rl-configs" / "src")
# After our own packages, which keep their versions.
sys.path.append(os.environ["COMPOSER_MESH_PRIME_RL_PACKAGES"])


def joined(name: str, folder: str) -> None:
    """Make one package of the folders that PRIME-RL installs as one."""
    package = types.ModuleType(name)
    package.__path__ = [str(part / folder) for part in PARTS]
    sys.modules[name] = package


joined("prime_rl", "prime_rl")
joined("prime_rl.utils", "prime_rl/utils")

from prime_rl.configs.trainer import (  # type: ignore[import-not-found]  # noqa: E402
    CustomLossConfig,
    DefaultLossConfig,
)
from prime_rl.trainer.rl import loss as theirs  # type: ignore[import-not-found]  # noqa: E402

from composer_mesh.losses.custom import LossInputs, custom_policy_loss  # noqa: E402
from composer_mesh.losses.policy import prime_rl_loss  # noqa: E402

OURS = "composer_mesh.plugins.frameworks.prime_rl"


def sequences(seed: int) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[torch.Tensor]] = {
        name: []
        for name in (
            "trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask",
        )
    }  # fmt: skip
    for length in (5, 17, 9):
        now = -3 * torch.rand(length, generator=generator)
        found["trainer_logprobs"].append(now.requires_grad_())
        for name in ("inference_logprobs", "ref_logprobs"):
            moved = now.detach() + 0.5 * torch.randn(length, generator=generator)
            found[name].append(moved.clamp(max=0))
        found["advantages"].append(torch.randn(length, generator=generator))
        found["loss_mask"].append(torch.rand(length, generator=generator) > 0.3)
    return found


def by_theirs(config: Any, seed: int) -> list[float]:
    """The loss and the gradients of PRIME-RL's own `compute_loss`."""
    data, scale = sequences(seed), 20
    loss, _ = theirs.compute_loss(
        **data,
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=theirs.setup_rl_loss_fn(config),
        rl_scale=scale,
        ce_scale=1,
        ref_kl_scale=1,
    )
    return with_gradients(loss, data)


def with_gradients(loss: torch.Tensor, data: dict[str, list[torch.Tensor]]) -> list[float]:
    gradients = torch.autograd.grad(loss, data["trainer_logprobs"])
    return [float(loss), *torch.cat(gradients).tolist()]


def default_by_ours(seed: int) -> list[float]:
    """The same of our loss, without PRIME-RL."""
    data = sequences(seed)
    terms = [
        prime_rl_loss(now, then, advantages, mask, normalizer=20).loss
        for now, then, advantages, mask in zip(
            *(data[name] for name in ("trainer_logprobs", "inference_logprobs")),
            data["advantages"],
            data["loss_mask"],
            strict=True,
        )
    ]
    return with_gradients(torch.stack(terms).sum(), data)


def their_function_in_ours(seed: int) -> list[float]:
    """PRIME-RL's default loss as a custom loss of ours."""
    data = sequences(seed)
    rows = [LossInputs(**{name: values[row] for name, values in data.items()}) for row in range(3)]
    found, _ = custom_policy_loss(
        theirs.default_loss_fn,
        "prime_rl",
        {"loss_config": DefaultLossConfig()},
        rows,
        normalizer=20,
    )
    return with_gradients(found, data)


def custom(name: str, **kwargs: Any) -> Any:
    return CustomLossConfig(type="custom", import_path=f"{OURS}.{name}", kwargs=kwargs)


def main() -> None:
    pairs = [
        [by_theirs(DefaultLossConfig(), seed), by_theirs(custom("loss_fn"), seed)]
        for seed in range(4)
    ]
    pairs += [[by_theirs(DefaultLossConfig(), s), default_by_ours(s)] for s in range(4)]
    pairs += [[by_theirs(DefaultLossConfig(), s), their_function_in_ours(s)] for s in range(4)]
    types = ("grpo", "cispo", "sapo", "dppo", "reinforce", "prime_rl_ipo")
    found = {
        "fields": {
            one.__name__: [field.name for field in dataclasses.fields(one)]
            for one in (theirs.LossInputs, theirs.LossOutputs)
        },
        "custom": list(CustomLossConfig.model_fields),
        "compute_loss": list(inspect.signature(theirs.compute_loss).parameters),
        "pairs": pairs,
        "types": {kind: by_theirs(custom("policy_loss", type=kind), 0) for kind in types},
        "sdpo": [by_theirs(custom("sdpo_loss", alpha=alpha), 0) for alpha in (0.0, 0.5)],
    }
    print(json.dumps(found))


main()
