"""A policy loss of your own: a trust region that is tighter for falling than for rising tokens.

Pushing an unlikely token down spreads its probability over everything else, so falls are bounded
closer than rises, and rollouts below the baseline count less. Use it from the repository root with

    composer-mesh train configs/quickstart.toml --set loss.type=custom \\
        --set loss.import_path=examples.custom_loss.asymmetric_loss --set run.steps=3 \\
        --set run.import_paths='["."]'
"""

import torch

from composer_mesh import LossInputs, LossOutputs


def asymmetric_loss(
    inputs: LossInputs,
    mask_low: float = 0.05,
    mask_high: float = 0.2,
    negative_weight: float = 0.5,
) -> LossOutputs:
    """A ratio-weighted policy gradient without the tokens that have moved far enough already.

        d    = exp(trainer_logprobs) - exp(inference_logprobs)
        drop = d > mask_high where A > 0, d < -mask_low elsewhere
        loss = -sum of [not drop] w A exp(trainer_logprobs - inference_logprobs)

    w is 1 where A > 0, else negative_weight. A SUM over the sequence: the run divides by the tokens
    of the whole step.
    """
    mask, positive = inputs.loss_mask, inputs.advantages > 0
    # Selected first: what stands under no mask is not meant for exp.
    policy = torch.where(mask, inputs.trainer_logprobs, 0.0)
    sampler = torch.where(mask, inputs.inference_logprobs, 0.0)
    moved = policy.detach().exp() - sampler.exp()
    dropped = mask & torch.where(positive, moved > mask_high, moved < -mask_low)
    weight = torch.where(positive, 1.0, negative_weight)
    gain = weight * inputs.advantages * (policy - sampler).exp()
    return LossOutputs(
        loss=-torch.where(mask & ~dropped, gain, 0.0).sum(),
        # 1-D metrics become means over all tokens of the step, numbers means over its rollouts.
        metrics={"dropped": dropped[mask].float(), "probability_moved": moved[mask].abs()},
    )
