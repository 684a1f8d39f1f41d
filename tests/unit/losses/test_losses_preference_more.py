"""IPO, SimPO and the links of DPO against their formulas, and their invariants."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.preference import (
    PreferenceLoss,
    dpo_loss,
    ipo_loss,
    mpo_loss,
    sequence_logprobs,
    simpo_loss,
)

FIGURES = ("loss", "margin", "accuracy", "chosen_reward", "rejected_reward")


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def bounded(x: float) -> float:
    return math.exp(min(x, 80.0))


def by_hand_exo(z: float) -> float:
    """KL of the policy's two probabilities to the smoothed labels (0.99, 0.01)."""
    return sum(sigmoid(x) * (log_sigmoid(x) - math.log(q)) for x, q in ((z, 0.99), (-z, 0.01)))


def pairs(n: int = 5, seed: int = 0, spread: float = 10.0) -> list[Tensor]:
    """Chosen, rejected and their reference log-probs in float64."""
    rng = torch.Generator().manual_seed(seed)
    values = [-spread * torch.rand(n, generator=rng, dtype=torch.float64) for _ in range(4)]
    return [v.requires_grad_() for v in values[:2]] + values[2:]


def lengths(n: int = 5, seed: int = 0) -> list[Tensor]:
    """Token counts of chosen and rejected answers; the first chosen one is empty."""
    rng = torch.Generator().manual_seed(seed)
    chosen, rejected = (torch.randint(1, 9, (n,), generator=rng) for _ in range(2))
    chosen[:1] = 0
    return [chosen, rejected]


LOSSES: dict[str, Callable[..., PreferenceLoss]] = {
    "dpo": lambda v, n, **kw: dpo_loss(*v, **kw),
    "dpo_smoothed": lambda v, n, **kw: dpo_loss(*v, label_smoothing=0.2, **kw),
    "hinge": lambda v, n, **kw: dpo_loss(*v, loss_type="hinge", **kw),
    "robust": lambda v, n, **kw: dpo_loss(*v, loss_type="robust", label_smoothing=0.1, **kw),
    "ipo": lambda v, n, **kw: ipo_loss(*v, *n, **kw),
    "ipo_sums": lambda v, n, **kw: ipo_loss(*v, **kw),
    "exo": lambda v, n, **kw: dpo_loss(*v, loss_type="exo_pair", label_smoothing=0.01, **kw),
    "apo_zero": lambda v, n, **kw: dpo_loss(*v, loss_type="apo_zero", **kw),
    "apo_down": lambda v, n, **kw: dpo_loss(*v, loss_type="apo_down", **kw),
    "bco": lambda v, n, **kw: dpo_loss(*v, loss_type="bco_pair", **kw),
    "averages": lambda v, n, **kw: dpo_loss(*v, *n, **kw),
    "forward_kl": lambda v, n, **kw: dpo_loss(*v, f_divergence_type="forward_kl", **kw),
    "js": lambda v, n, **kw: dpo_loss(*v, f_divergence_type="js_divergence", **kw),
    "alpha": lambda v, n, **kw: dpo_loss(*v, f_divergence_type="alpha_divergence", **kw),
    "mpo": lambda v, n, **kw: mpo_loss(*v, *n, **kw),
    "mpo_of_averages": lambda v, n, **kw: mpo_loss(
        *v, *n, loss_types={"ipo": 0.5, "sigmoid_norm": 2.0}, **kw
    ),
    "simpo": lambda v, n, **kw: simpo_loss(*v[:2], *n, **kw),
    "simpo_smoothed": lambda v, n, **kw: simpo_loss(*v[:2], *n, label_smoothing=0.2, **kw),
    "simpo_hinge": lambda v, n, **kw: simpo_loss(*v[:2], *n, loss_type="hinge", **kw),
}


def by_hand(name: str, row: list[float], chosen_length: int, rejected_length: int) -> float:
    """The loss of one pair with default settings, as its paper states it."""
    chosen, rejected, reference_chosen, reference_rejected = row
    for_chosen, for_rejected = chosen - reference_chosen, rejected - reference_rejected
    nc, nr = max(chosen_length, 1), max(rejected_length, 1)
    z = 0.1 * (for_chosen - for_rejected)
    s = 2.0 * (chosen / nc - rejected / nr) - 0.5
    c, r, averages = 0.1 * for_chosen, 0.1 * for_rejected, for_chosen / nc - for_rejected / nr
    return {
        "dpo": -log_sigmoid(z),
        "dpo_smoothed": -0.8 * log_sigmoid(z) - 0.2 * log_sigmoid(-z),
        "exo": by_hand_exo(z),
        "apo_zero": 1 - sigmoid(c) + sigmoid(r),
        "apo_down": sigmoid(c) + 1 - sigmoid(z),
        "bco": -log_sigmoid(c) - log_sigmoid(-r),
        "averages": -log_sigmoid(0.1 * averages),
        "forward_kl": -log_sigmoid(0.1 * (bounded(-for_rejected) - bounded(-for_chosen))),
        "js": -log_sigmoid(0.1 * (log_sigmoid(for_chosen) - log_sigmoid(for_rejected))),
        "alpha": -log_sigmoid(0.2 * (bounded(-for_rejected / 2) - bounded(-for_chosen / 2))),
        "mpo": -0.8 * log_sigmoid(z) + 0.2 * (-log_sigmoid(c) - log_sigmoid(-r)) - chosen / nc,
        "mpo_of_averages": 0.5 * (averages - 5) ** 2 - 2 * log_sigmoid(0.1 * averages),
        "hinge": max(0.0, 1 - z),
        "robust": (-0.9 * log_sigmoid(z) + 0.1 * log_sigmoid(-z)) / 0.8,
        "ipo": (for_chosen / nc - for_rejected / nr - 5) ** 2,
        "ipo_sums": (for_chosen - for_rejected - 5) ** 2,
        "simpo": -log_sigmoid(s),
        "simpo_smoothed": -0.8 * log_sigmoid(s) - 0.2 * log_sigmoid(-s),
        "simpo_hinge": max(0.0, 1 - s),
    }[name]


@pytest.mark.parametrize("spread", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_agree_with_the_formula(name: str, spread: float) -> None:
    values, counts = pairs(spread=spread), lengths()

    def total(rows: list[list[float]]) -> float:
        sizes = (c.tolist() for c in counts)
        return sum(by_hand(name, *x) for x in zip(rows, *sizes, strict=True)) / 8

    found = LOSSES[name](values, counts, normalizer=8)
    gradients = torch.autograd.grad(found.loss, values[:2])
    rows = torch.stack(values, -1).tolist()
    assert found.loss.item() == pytest.approx(total(rows), rel=1e-9)
    for side, gradient in enumerate(gradients):
        for b in range(len(rows)):
            step = []
            for h in (1e-6, -1e-6):
                moved = [list(row) for row in rows]
                moved[b][side] += h
                step.append(total(moved))
            slope = (step[0] - step[1]) / 2e-6
            # The difference of two large values knows a slope to their rounding over the step.
            noise = 1e-6 + 1e-9 * abs(total(rows))
            assert gradient[b].item() == pytest.approx(slope, rel=1e-5, abs=noise)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_agrees_with_float64_and_half_is_computed_in_float32(name: str) -> None:
    values = [v.detach() for v in pairs()]
    exact = LOSSES[name](values, lengths(), normalizer=5).loss
    single = LOSSES[name]([v.float() for v in values], lengths(), normalizer=5).loss
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=5e-5, atol=2e-6)
    half = LOSSES[name]([v.bfloat16() for v in values], lengths(), normalizer=5).loss
    again = LOSSES[name]([v.bfloat16().float() for v in values], lengths(), normalizer=5).loss
    assert torch.equal(half, again)


@given(split=st.integers(0, 6), seed=st.integers(0, 2**16), name=st.sampled_from(list(LOSSES)))
@settings(max_examples=40, deadline=None)
def test_microbatch_losses_add_up_to_the_batch_loss(split: int, seed: int, name: str) -> None:
    values, counts = pairs(6, seed), lengths(6, seed)

    def part(rows: slice) -> PreferenceLoss:
        return LOSSES[name]([v[rows] for v in values], [c[rows] for c in counts], normalizer=6)

    whole, first, second = part(slice(None)), part(slice(split)), part(slice(split, None))
    for figure in FIGURES:
        total = getattr(first, figure) + getattr(second, figure)
        torch.testing.assert_close(total, getattr(whole, figure), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_pairs_does_not_matter(name: str) -> None:
    values, counts, order = pairs(), lengths(), torch.tensor([3, 1, 4, 0, 2])
    found = LOSSES[name](values, counts, normalizer=5).loss
    moved = LOSSES[name]([v[order] for v in values], [c[order] for c in counts], normalizer=5).loss
    torch.testing.assert_close(found, moved, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_reaches_the_reference(name: str) -> None:
    values = [v.detach().requires_grad_() for v in pairs()]
    found = LOSSES[name](values, lengths(), normalizer=5)
    found.loss.backward()
    assert [v.grad is None for v in values] == [False, False, True, True]
    assert not any(getattr(found, figure).requires_grad for figure in FIGURES[1:])


@pytest.mark.parametrize("name", LOSSES)
def test_no_pairs_give_zero_with_a_graph(name: str) -> None:
    values = [torch.zeros(0, requires_grad=True) for _ in range(4)]
    found = LOSSES[name](values, lengths(0), normalizer=0)
    found.loss.backward()
    assert [getattr(found, figure).item() for figure in FIGURES] == [0] * len(FIGURES)
    assert values[0].grad.shape == (0,)


@pytest.mark.parametrize("name", ["ipo", "simpo"])
def test_two_empty_answers_give_a_finite_loss_and_gradient(name: str) -> None:
    tokens = torch.full((2, 3), math.nan, requires_grad=True)
    empty = torch.zeros(2, 3, dtype=torch.bool)
    sums, count = sequence_logprobs(tokens, empty), empty.sum(-1)
    found = LOSSES[name]([sums, sums, sums.detach(), sums.detach()], [count, count], normalizer=2)
    found.loss.backward()
    expected = {"ipo": 25.0, "simpo": -log_sigmoid(-0.5)}[name]
    assert found.loss.item() == pytest.approx(expected)
    assert torch.equal(tokens.grad, torch.zeros(2, 3))


def test_ipo_with_the_lengths_of_one_side_is_an_error() -> None:
    with pytest.raises(ValueError, match="lengths of one side only"):
        ipo_loss(*pairs(), lengths()[0], normalizer=5)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("ipo", {"beta": 0.0}, "ipo beta is 0.0 but must be > 0: use 0.1"),
        ("simpo", {"beta": -1}, "simpo beta is -1 but must be > 0: use 2.0"),
        ("simpo", {"gamma": -0.1}, "simpo gamma is -0.1 but must be finite and >= 0"),
        ("simpo", {"gamma": math.inf}, "simpo gamma is inf"),
        ("simpo", {"label_smoothing": 0.5}, r"label_smoothing is 0.5 but must be in \[0, 0.5\)"),
        ("hinge", {"label_smoothing": 0.1}, "label_smoothing is 0.1 but hinge has none"),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    name: str, changed: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES[name](pairs(), lengths(), **{"normalizer": 5, **changed})
