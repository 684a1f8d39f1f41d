"""One three-channel optimizer step by the SDK: by the server's own loss, or by public losses alone.

    submit         one forward_backward with the loss `three_channel`, which this server has
    submit_public  ppo, and two losses of the client's own, which every server of the protocol has

Both add the same gradients, up to rounding. The second needs torch, as the SDK does for losses of a
client's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinker import types

from composer_mesh.plugins.tinker.client.sequences import (
    Arrays,
    Draft,
    Pair,
    ThreeChannelStep,
    three_channel_arrays,
)

LOSS: Any = "three_channel"
Loss = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, dict[str, float]]]


def datum(arrays: Arrays) -> types.Datum:
    """Return a sequence as the SDK sends it."""
    inputs = {name: types.TensorData.from_numpy(one) for name, one in arrays.inputs.items()}
    tokens = types.ModelInput.from_ints(arrays.tokens.tolist())
    return types.Datum(model_input=tokens, loss_fn_inputs=inputs)


def submit(training: Any, step: ThreeChannelStep) -> Any:
    """Send a step as one forward_backward; return its future, whose metrics have each channel.

    The SDK sends more than 1,024 sequences, or 5 MB, in several requests: a pair that would be cut
    is refused by the server.
    """
    data = [datum(one) for one in three_channel_arrays(step)]
    return training.forward_backward(data, LOSS, step.options)


def submit_public(training: Any, step: ThreeChannelStep) -> list[Any]:
    """Send a step by losses of the public protocol; return a future for each channel with data."""
    futures = [_policy(training, step)]
    if step.hinted and step.alpha:
        data = [datum(_without_policy(step, n)) for n in _hinted_rollouts(step)]
        futures.append(training.forward_backward_custom(data, _divergence(step)))
    if step.pairs and step.beta:
        data = [datum(_side(ids)) for pair in step.pairs for ids, _, _ in pair.sides]
        futures.append(training.forward_backward_custom(data, _preference(step)))
    return futures


def _policy(training: Any, step: ThreeChannelStep) -> Any:
    """Send the policy loss: PPO's surrogate with advantages that are divided by the step's ids."""
    alone = ThreeChannelStep(step.rollouts)
    data = []
    for one in three_channel_arrays(alone):
        inputs = dict(one.inputs)
        inputs["advantages"] = inputs["advantages"] * inputs.pop("weights")
        del inputs["preference"]
        data.append(datum(Arrays(one.tokens, inputs)))
    clip = {name: step.options[name] for name in ("clip_low_threshold", "clip_high_threshold")}
    return training.forward_backward(data, "ppo", clip)


def _hinted_rollouts(step: ThreeChannelStep) -> list[int]:
    """Return the numbers of the rollouts with a hinted turn."""
    return [
        number
        for number, rollout in enumerate(step.rollouts)
        if any(one.rollout is rollout for one in step.hinted)
    ]


def _teachers(step: ThreeChannelStep, number: int) -> Arrays:
    """Return the arrays of a rollout with the columns of its teachers alone."""
    whole = three_channel_arrays(step)[number]
    return Arrays(whole.tokens, {name: one[:, 1:] for name, one in whole.inputs.items()})


def _without_policy(step: ThreeChannelStep, number: int) -> Arrays:
    found = _teachers(step, number)
    return Arrays(found.tokens, {"target_tokens": found.inputs["target_tokens"]})


def _divergence(step: ThreeChannelStep) -> Loss:
    """Return SDPO's divergence of the answers' rows, as a loss of log-probs [T, K]."""
    known = [_teachers(step, number).inputs for number in _hinted_rollouts(step)]

    def loss(_: Sequence[Any], logprobs: Sequence[Any]) -> tuple[Any, dict[str, float]]:
        import torch

        from composer_mesh.plugins.tinker.client_losses import divergence

        parts = [
            divergence(
                own.reshape(inputs["logprobs"].shape),
                torch.from_numpy(inputs["logprobs"]),
                torch.from_numpy(inputs["weights"]),
                step.jsd_beta,
            )
            for own, inputs in zip(logprobs, known, strict=True)
        ]
        return _weighted("sdpo", sum(parts[1:], start=parts[0]), step.alpha)

    return loss


def _weighted(name: str, loss: Any, weight: float) -> tuple[Any, dict[str, float]]:
    """Return the part of the step's loss that one channel is, and its metric."""
    from composer_mesh.channels.step import step_loss

    found = step_loss({name: lambda: loss}, {name: weight})
    return found.total(), {f"loss/{name}:sum": float(found.losses[name])}


def _side(ids: Sequence[int]) -> Arrays:
    found = Draft(ids, 1).done()
    return Arrays(found.tokens, {"target_tokens": found.inputs["target_tokens"]})


def _preference(step: ThreeChannelStep) -> Loss:
    """Return DPO of the pairs, as a loss of the log-probs of both sides of each."""
    pairs = step.pairs

    def loss(_: Sequence[Any], logprobs: Sequence[Any]) -> tuple[Any, dict[str, float]]:
        import torch

        from composer_mesh.losses.preference import dpo_loss

        sums = torch.stack([own[-_length(pairs, n) :].sum() for n, own in enumerate(logprobs)])
        known = [sum(one) for pair in pairs for _, one, _ in pair.sides]
        reference = torch.tensor(known, dtype=sums.dtype)
        sides = sums[::2], sums[1::2], reference[::2], reference[1::2]
        total = dpo_loss(*sides, beta=step.dpo_beta, normalizer=len(pairs)).loss
        return _weighted("replay", total, step.beta)

    return loss


def _length(pairs: Sequence[Pair], number: int) -> int:
    """Return the ids of the answer of a side, by its number among all sides."""
    pair = pairs[number // 2]
    return len(pair.rejected if number % 2 else pair.chosen)
