"""Losses of this project as PRIME-RL's `custom` loss, by their import path.

    [trainer.loss]
    type = "custom"
    import_path = "composer_mesh.plugins.frameworks.prime_rl.policy_loss"
    kwargs = { type = "cispo", clip_high = 5.0 }

PRIME-RL calls the function once for each sequence and divides the sum of all by the tokens of the
step, so a loss is a sum over tokens here. It hands out log-probs of the sampled tokens and no
logits: of the SDPO channel the sampled-token form can run there, and pairs cannot (see
docs/prime-rl.md). Reads the fields of any object, and imports no PRIME-RL.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from composer_mesh.channels.step import POLICY, step_loss
from composer_mesh.losses.custom_function import LossOutputs
from composer_mesh.losses.distillation import sampled_reverse_kl
from composer_mesh.losses.policy import (
    PolicyLoss,
    cispo_loss,
    dppo_loss,
    grpo_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
    reinforce_loss,
    sapo_loss,
)

AGAINST_SAMPLING: Mapping[str, Callable[..., PolicyLoss]] = MappingProxyType(
    {
        "prime_rl": prime_rl_loss,
        "prime_rl_ipo": prime_rl_ipo_loss,
        "grpo": grpo_loss,
        "cispo": cispo_loss,
        "sapo": sapo_loss,
        "dppo": dppo_loss,
    }
)
"""Losses whose ratio is to the log-probs of sampling, by their names in [loss]."""

TYPES = (*AGAINST_SAMPLING, "reinforce")
REFERENCED = {"prime_rl", "grpo", "cispo", "sapo"}
"""Losses that can read the log-probs of a reference."""
WITHOUT_AGGREGATION = {"prime_rl", "prime_rl_ipo"}


def policy_loss(inputs: Any, *, type: str = "grpo", **options: Any) -> LossOutputs:
    """Return one of our policy losses of a sequence, summed over its tokens.

    `inputs` are PRIME-RL's `LossInputs`; `options` are those of [loss] with that `type`
    (docs/losses.md), but `aggregation`, which is by tokens. Raises ValueError for another type.
    """
    if type not in TYPES:
        raise ValueError(f"type is {type!r} but must be one of {', '.join(TYPES)}: correct it")
    if "aggregation" in options:
        raise ValueError(
            "aggregation is set, but PRIME-RL divides by the tokens of the step whatever a loss "
            "says: leave it out"
        )
    found = _policy(inputs, type, options)
    return LossOutputs(found.loss, _metrics(found, inputs.loss_mask))


def sdpo_loss(
    inputs: Any,
    *,
    alpha: float,
    policy: str = "prime_rl",
    **options: Any,
) -> LossOutputs:
    """Return a policy loss + alpha * the sampled-token SDPO loss, summed over the tokens.

    The teacher is whoever made `ref_logprobs`: with PRIME-RL's algorithm `opsd` the live policy
    that reads a demonstration. Tokens without a teacher (`ref_logprobs` None) have no SDPO term.
    `policy` and `options` are those of `policy_loss`.
    """
    if not alpha >= 0:
        raise ValueError(f"alpha is {alpha} but must be >= 0: use 0.05")
    found = _policy(inputs, policy, options)
    metrics = _metrics(found, inputs.loss_mask)
    if inputs.ref_logprobs is None or alpha == 0:
        return LossOutputs(found.loss, metrics)
    distilled = sampled_reverse_kl(
        inputs.trainer_logprobs, inputs.ref_logprobs, inputs.loss_mask, normalizer=1
    )
    metrics["sdpo"] = distilled.detach() / _count(inputs.loss_mask)
    terms = {POLICY: lambda: found.loss, "sdpo": lambda: distilled}
    return LossOutputs(step_loss(terms, {"sdpo": alpha}).total(), metrics)


def loss_fn(
    inputs: Any,
    *,
    alpha_sdpo: float = 0.0,
    beta_dpo: float = 0.0,
    dppo_mask_high: float = 0.2,
    dppo_mask_low: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> LossOutputs:
    """The composer-replication framework's loss for PRIME-RL, by its names.

    PRIME-RL's default loss, with the sampled-token SDPO term where `alpha_sdpo` is above 0 and the
    batch has `ref_logprobs`. Raises ValueError for `beta_dpo` above 0: a batch has no pairs.
    """
    if beta_dpo > 0:
        raise ValueError(
            f"beta_dpo is {beta_dpo}, but PRIME-RL's batches have no pairs: set it to 0, and train "
            "pairs with TRL or composer-mesh"
        )
    bounds: dict[str, Any] = {"mask_high": dppo_mask_high, "mask_low": dppo_mask_low}
    return sdpo_loss(inputs, alpha=alpha_sdpo, adv_tau=adv_tau, kl_tau=kl_tau, **bounds)


def _policy(inputs: Any, kind: str, options: Mapping[str, Any]) -> PolicyLoss:
    shared: dict[str, Any] = {"normalizer": 1, "sampling_weights": inputs.loss_weights, **options}
    if kind not in WITHOUT_AGGREGATION:
        shared["aggregation"] = "dapo"
    if kind in REFERENCED:
        shared["reference_logprobs"] = inputs.ref_logprobs
    if kind == "reinforce":
        return reinforce_loss(
            inputs.trainer_logprobs, inputs.advantages, inputs.loss_mask, **shared
        )
    return AGAINST_SAMPLING[kind](
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages,
        inputs.loss_mask,
        **shared,
    )


def _metrics(found: PolicyLoss, mask: Tensor) -> dict[str, Tensor]:
    """Return the means over a sequence's tokens that PRIME-RL logs."""
    named = {
        "clipped_fraction": found.clipped_fraction,
        "ratio_mean": found.ratio_mean,
        "mismatch_kl": found.kl_k3,
    }
    return {name: one.detach() / _count(mask) for name, one in named.items()}


def _count(mask: Tensor) -> Tensor:
    return mask.sum().clamp(min=1)
