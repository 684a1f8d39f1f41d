"""Custom losses: PRIME-RL's convention, and errors that name the function and the sequence.

Custom advantages: PRIME-RL's grouped rollouts, ragged groups, and errors that say where.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.advantages import group_advantages
from composer_mesh.losses.custom import (
    AdvantageInputs,
    AdvantageOutputs,
    CustomFunctionError,
    LossInputs,
    LossOutputs,
    MetricSum,
    custom_advantages,
    custom_policy_loss,
)
from composer_mesh.losses.policy import prime_rl_loss

NAME = "my_module.my_loss"


@dataclass
class TheirOutputs:
    """A class of the user's framework, which this one has never seen."""

    loss: Tensor
    metrics: dict[str, Tensor]


def masked_policy_gradient(
    inputs: LossInputs, mask_low: float = 0.2, mask_high: float = 0.2, kl_tau: float = 1e-3
) -> TheirOutputs:
    """As a PRIME-RL user would write it: trust region by sign, a squared log-ratio, a sum."""
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    moved = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
    outside = torch.where(inputs.advantages > 0, moved > mask_high, moved < -mask_low)
    keep = inputs.loss_mask & ~outside
    gain = keep * inputs.advantages * log_ratio.exp()
    loss = (-gain + kl_tau * (inputs.loss_mask * log_ratio**2)).sum()
    return TheirOutputs(loss, {"outside": outside[inputs.loss_mask].float().mean()})


def likelihood(inputs: LossInputs, scale: float = 1.0) -> LossOutputs:
    chosen = inputs.trainer_logprobs[inputs.loss_mask]
    return LossOutputs(-scale * chosen.sum(), {"nll": -chosen.detach(), "tokens": len(chosen)})


def sequences(seed: int = 0, sizes: tuple[int, ...] = (5, 3, 7)) -> list[LossInputs]:
    rng = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        trainer, inference, reference, advantages = (
            torch.randn(size, generator=rng, dtype=torch.float64) - 1.5 for _ in range(4)
        )
        mask = torch.rand(size, generator=rng) < 0.6
        mask[0] = True
        trainer.requires_grad_()
        found.append(LossInputs(trainer, inference, reference, advantages + 1.5, mask))
    return found


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_written_for_prime_rl_equals_the_one_built_in(seed: int) -> None:
    batch = sequences(seed)
    kwargs = {"mask_high": 0.3, "kl_tau": 0.01}
    custom, _ = custom_policy_loss(masked_policy_gradient, NAME, kwargs, batch, normalizer=9)
    names = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
    built_in = prime_rl_loss(
        *(padded([getattr(s, name) for s in batch]) for name in names), normalizer=9, **kwargs
    ).loss
    assert custom.item() == pytest.approx(built_in.item(), rel=1e-9)
    policy = [s.trainer_logprobs for s in batch]
    for found, expected in zip(
        torch.autograd.grad(custom, policy), torch.autograd.grad(built_in, policy), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_sum_over_sequences_by_the_normalizer() -> None:
    batch = sequences()
    loss, _ = custom_policy_loss(likelihood, NAME, {"scale": 3}, batch, normalizer=8)
    loss.backward()
    total = -sum(s.trainer_logprobs.detach()[s.loss_mask].sum().item() for s in batch)
    assert loss.item() == pytest.approx(3 * total / 8, rel=1e-12)
    for s in batch:
        torch.testing.assert_close(s.trainer_logprobs.grad, -3 / 8 * s.loss_mask.double())


def test_metrics_are_averaged_over_what_was_reported_and_add_up() -> None:
    batch = sequences()
    chosen = [s.trainer_logprobs.detach()[s.loss_mask] for s in batch]
    whole = custom_policy_loss(likelihood, NAME, {}, batch, normalizer=8)[1]
    assert whole["nll"].mean == pytest.approx(-torch.cat(chosen).mean().item())
    assert whole["tokens"].mean == pytest.approx(sum(map(len, chosen)) / 3)
    first = custom_policy_loss(likelihood, NAME, {}, batch[:1], normalizer=8)[1]
    second = custom_policy_loss(likelihood, NAME, {}, batch[1:], normalizer=8)[1]
    for key, metric in whole.items():
        assert (first[key] + second[key]).mean == pytest.approx(metric.mean)
    assert MetricSum(0.0, 0).mean == 0


def test_a_sequence_without_trainable_tokens_is_not_shown_and_keeps_a_graph() -> None:
    batch = sequences()[:1]
    batch[0].loss_mask[:] = False
    with torch.no_grad():
        batch[0].trainer_logprobs[:] = math.nan
    loss, metrics = custom_policy_loss(fails, NAME, {}, batch, normalizer=0)
    loss.backward()
    assert loss.item() == 0
    assert metrics == {}
    assert torch.equal(batch[0].trainer_logprobs.grad, torch.zeros(5, dtype=torch.float64))


def test_no_sequences_give_a_zero_that_can_be_differentiated() -> None:
    loss, metrics = custom_policy_loss(likelihood, NAME, {}, [], normalizer=0)
    loss.backward()
    assert (loss.item(), metrics) == (0, {})


def test_what_stands_under_no_mask_changes_nothing_even_when_nan() -> None:
    results = []
    for filling in (0.0, math.nan, math.inf):
        batch = sequences()
        for s in batch:
            with torch.no_grad():
                for values in (s.trainer_logprobs, s.inference_logprobs, s.advantages):
                    values[~s.loss_mask] = filling
        policy = [s.trainer_logprobs for s in batch]
        loss, _ = custom_policy_loss(masked_policy_gradient, NAME, {}, batch, normalizer=8)
        results.append([loss.detach(), *torch.autograd.grad(loss, policy)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_finite_content_under_no_mask_is_shown_as_it_is() -> None:
    batch = sequences()[:1]
    seen: list[LossInputs] = []

    def looks(inputs: LossInputs) -> LossOutputs:
        seen.append(inputs)
        return likelihood(inputs)

    custom_policy_loss(looks, NAME, {}, batch, normalizer=1)
    assert torch.equal(seen[0].trainer_logprobs, batch[0].trainer_logprobs)
    assert seen[0].teacher_logprobs is seen[0].ref_logprobs
    assert torch.equal(seen[0].ref_logprobs, batch[0].ref_logprobs)


def test_only_the_policy_gets_a_gradient() -> None:
    batch = sequences()
    others = [getattr(s, k) for s in batch for k in ("inference_logprobs", "advantages")]
    for values in others:
        values.requires_grad_()
    custom_policy_loss(masked_policy_gradient, NAME, {}, batch, normalizer=8)[0].backward()
    assert [values.grad for values in others] == [None] * 6
    assert all(s.trainer_logprobs.grad is not None for s in batch)


def test_half_precision_is_shown_as_float32() -> None:
    policy = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    fixed = policy.detach()
    batch = [LossInputs(policy, fixed, None, fixed, torch.tensor([True, True]))]
    loss, _ = custom_policy_loss(masked_policy_gradient, NAME, {}, batch, normalizer=1)
    assert loss.dtype == torch.float32


def test_a_loss_without_metrics_may_leave_them_out() -> None:
    def bare(inputs: LossInputs) -> SimpleNamespace:
        return SimpleNamespace(loss=-inputs.trainer_logprobs.sum())

    assert custom_policy_loss(bare, NAME, {}, sequences(), normalizer=1)[1] == {}


def fails(inputs: LossInputs) -> LossOutputs:
    raise RuntimeError("no such luck")


def policy(inputs: LossInputs) -> Tensor:
    return inputs.trainer_logprobs.sum()


def returning(make: Callable[[Tensor], Any], **metrics: Any) -> Callable[..., Any]:
    def function(inputs: LossInputs) -> Any:
        return SimpleNamespace(loss=make(inputs.trainer_logprobs), metrics=metrics)

    return function


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (fails, "it raised RuntimeError: no such luck"),
        (lambda inputs: policy(inputs), "returned a Tensor without 'loss'"),
        (returning(lambda x: 1.0), "its loss is a float but must be a scalar tensor"),
        (returning(lambda x: x), r"its loss has shape \(3,\) but must be a scalar"),
        (returning(lambda x: x.sum().long()), "its loss is torch.int64 but must be floating"),
        (returning(lambda x: x.sum() * math.nan), "its loss is nan but must be finite"),
        (returning(lambda x: x.sum() / 0), "its loss is -inf but must be finite"),
        (returning(lambda x: x.sum().detach()), "its loss has no graph, so it would train nothing"),
        (returning(torch.sum, a=torch.zeros(2, 2)), r"metric 'a' is a Tensor of shape \(2, 2\)"),
        (returning(torch.sum, a="b"), "metric 'a' is a str but must be a number"),
        (returning(torch.sum, a=math.nan), "metric 'a' is nan but must be finite"),
        (returning(torch.sum, a=torch.tensor([1, math.inf])), "metric 'a' is inf"),
        (lambda inputs: SimpleNamespace(loss=policy(inputs), metrics=[1]), "metrics are a list"),
    ],
)
def test_a_bad_result_is_an_error_that_names_function_and_sequence(
    function: Callable[..., Any], problem: str
) -> None:
    def second_is_bad(inputs: LossInputs) -> Any:
        return function(inputs) if len(inputs.loss_mask) == 3 else likelihood(inputs)

    where = rf"custom function 'my_module.my_loss', sequence 1 \(trace-b\): .*{problem}"
    with pytest.raises(CustomFunctionError, match=where) as caught:
        custom_policy_loss(
            second_is_bad, NAME, {}, sequences(), normalizer=8, ids=["trace-a", "trace-b", "c"]
        )
    if function is fails:
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_without_ids_the_index_names_the_sequence() -> None:
    with pytest.raises(CustomFunctionError, match=r"'my_module\.my_loss', sequence 0: it raised"):
        custom_policy_loss(fails, NAME, {}, sequences(), normalizer=8)
    with pytest.raises(ValueError, match="there are 1 ids for 3 sequences"):
        custom_policy_loss(likelihood, NAME, {}, sequences(), normalizer=8, ids=["a"])


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("loss_mask", torch.ones(5), "loss_mask is torch.float32 but must be bool"),
        ("advantages", torch.zeros(4), r"advantages is torch.float32 of shape \(4,\)"),
        ("ref_logprobs", torch.zeros(5).long(), "ref_logprobs is torch.int64"),
    ],
)
def test_a_sequence_of_the_wrong_shape_or_type_is_named(
    field: str, value: Tensor, problem: str
) -> None:
    batch = sequences()
    setattr(batch[0], field, value)
    with pytest.raises(CustomFunctionError, match=f"sequence 0: {problem}"):
        custom_policy_loss(likelihood, NAME, {}, batch, normalizer=8)


ADVANTAGE = "my_module.my_advantage"


def normalized(inputs: AdvantageInputs, eps: float = 1e-4) -> AdvantageOutputs:
    """As a PRIME-RL user would write it."""
    rewards = torch.tensor([[r["reward"] for r in group] for group in inputs.rollouts])
    mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    return AdvantageOutputs(advantages=(rewards - mean) / (std + eps))


def rollouts(*rewards: list[float]) -> list[list[dict[str, Any]]]:
    return [[{"reward": r, "trajectory": []} for r in group] for group in rewards]


def test_an_advantage_written_for_prime_rl_equals_the_one_built_in() -> None:
    rewards = [[0.0, 1.0, 1.0], [2.0, -1.0, 0.5]]
    found = custom_advantages(normalized, ADVANTAGE, {"eps": 1e-6}, rollouts(*rewards))
    expected = group_advantages(torch.tensor(rewards), eps=1e-6)
    torch.testing.assert_close(torch.stack(found), expected)


def test_all_groups_of_one_size_are_shown_in_one_call() -> None:
    calls: list[AdvantageInputs] = []

    def counts(inputs: AdvantageInputs) -> AdvantageOutputs:
        calls.append(inputs)
        return normalized(inputs)

    custom_advantages(counts, ADVANTAGE, {}, rollouts([0.0, 1.0], [1.0, 3.0], [2.0, 0.0]))
    assert [len(call.rollouts) for call in calls] == [3]


def test_ragged_groups_are_shown_by_size_and_come_back_in_order() -> None:
    rewards = [[0.0, 1.0, 1.0], [5.0, 7.0], [], [2.0, -1.0, 0.5]]
    found = custom_advantages(normalized, ADVANTAGE, {}, rollouts(*rewards))
    assert [len(group) for group in found] == [3, 2, 0, 3]
    for group, own in zip(found, rewards, strict=True):
        torch.testing.assert_close(group, group_advantages(torch.tensor(own)))


def test_advantages_are_detached_and_at_least_float32() -> None:
    def learned(inputs: AdvantageInputs) -> AdvantageOutputs:
        return AdvantageOutputs(torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True))

    (found,) = custom_advantages(learned, ADVANTAGE, {}, rollouts([0.0, 1.0]))
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_no_groups_have_no_advantages() -> None:
    assert custom_advantages(normalized, ADVANTAGE, {}, []) == []


def failing_advantage(inputs: AdvantageInputs) -> AdvantageOutputs:
    raise KeyError("reward")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (failing_advantage, "it raised KeyError: 'reward'"),
        (lambda inputs: torch.zeros(2, 2), "returned a Tensor without 'advantages'"),
        (lambda inputs: AdvantageOutputs(torch.zeros(4)), r"shape \(4,\) but the rewards \(2, 2\)"),
        (lambda inputs: AdvantageOutputs(torch.ones(2, 2).long()), "advantages are torch.int64"),
        (lambda inputs: SimpleNamespace(advantages=[[1, 2]]), "its advantages are a list"),
    ],
)
def test_a_bad_result_is_an_error_that_names_function_and_prompts(
    function: Callable[..., Any], problem: str
) -> None:
    where = rf"custom function 'my_module.my_advantage', prompt 0 \(a\) to prompt 1: .*{problem}"
    with pytest.raises(CustomFunctionError, match=where):
        custom_advantages(
            function,
            ADVANTAGE,
            {},
            rollouts([0.0, 1.0], [1.0, 1.0]),
            ids=[["a", "b"], ["c", "d"]],
        )


def test_a_non_finite_advantage_names_the_rollout() -> None:
    groups = rollouts([0.0, 1.0], [1.0, 1.0])
    where = r"prompt 1, rollout 0 \(c\): its advantage is nan but must be finite"
    with pytest.raises(CustomFunctionError, match=where):
        custom_advantages(normalized, ADVANTAGE, {"eps": 0.0}, groups, ids=[["a", "b"], ["c", "d"]])
    assert math.isnan(normalized(AdvantageInputs(groups), eps=0.0).advantages[1, 0])


def test_a_signature_that_does_not_fit_is_an_error_before_anything_runs() -> None:
    with pytest.raises(CustomFunctionError, match="unexpected keyword argument 'epsilon'"):
        custom_advantages(normalized, ADVANTAGE, {"epsilon": 1}, [])
