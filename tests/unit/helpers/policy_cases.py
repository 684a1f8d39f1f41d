"""Each loss of the config beside its function on whole logits, with every option by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from step_batches import (
    own_logprobs,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_mesh.losses.policy import (
    PolicyLoss,
    Rejection,
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    gmpo_loss,
    grpo_loss,
    off_policy_weights,
    prime_rl_ipo_loss,
    prime_rl_loss,
    reinforce_loss,
    sampling_weights,
    sapo_loss,
    vespo_loss,
)
from composer_mesh.rollouts.batches import StepBatch

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
RATE = 1e-3
LONGEST = 2 * 10
"""Tokens that an episode of NARROW may write: what dr_grpo divides each sequence by."""


@dataclass(frozen=True)
class Whole:
    """A batch by token [B, T]: `now` carries the gradient, all else is a constant."""

    now: Tensor
    then: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def sequences(self) -> int:
        return len(self.mask)

    def counts(self) -> dict[str, int]:
        """What each aggregation divides by."""
        return {
            "grpo": self.sequences,
            "bnpo": self.tokens,
            "luspo": self.sequences,
            "dapo": self.tokens,
            "dr_grpo": self.sequences * LONGEST,
        }

    def weights(self, mode: str, maximum: float, minimum: float | None) -> Tensor:
        now = self.now.detach()
        options: Any = {"mode": mode, "maximum": maximum, "minimum": minimum}
        return sampling_weights(now, self.then, self.mask, **options)

    def on_policy(self, threshold: float) -> Tensor:
        kept = off_policy_weights(
            self.now, self.then, self.advantages, self.mask, threshold=threshold
        )
        assert 0 < float(kept.mean()) < 1, "the threshold has to drop some sequences"
        return kept


def whole(model: Any, reference: Any, batch: StepBatch, temperature: float) -> Whole:
    def rows(values: Any) -> Tensor:
        return pad_sequence(list(values), batch_first=True)

    with torch.no_grad():
        frozen = rows(own_logprobs(reference, s.ids, temperature) for s in batch.samples)
    return Whole(
        now=rows(own_logprobs(model, s.ids, temperature) for s in batch.samples),
        then=rows(torch.tensor(s.logprobs)[1:] for s in batch.samples),
        reference=frozen,
        advantages=torch.tensor([s.advantage for s in batch.samples]),
        mask=rows(torch.tensor(s.mask)[1:] for s in batch.samples),
    )


Case = tuple[dict[str, Any], Callable[[Whole], PolicyLoss]]
CLIPS: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.15}


def ratio(function: Any, w: Whole, kind: str = "dapo", **options: Any) -> PolicyLoss:
    """A loss of the GRPO family, relative to the generator."""
    count = w.counts()[kind]
    return function(
        w.now, w.then, w.advantages, w.mask, aggregation=kind, normalizer=count, **options
    )


def corrected(function: Any, w: Whole, mode: str, **options: Any) -> PolicyLoss:
    """The same relative to the trainer itself, weighted by trainer over generator."""
    weights, now = w.weights(mode, 1.1, 0.8), w.now.detach()
    options = {"aggregation": "dapo", **options, "sampling_weights": weights}
    return function(w.now, now, w.advantages, w.mask, normalizer=w.tokens, **options)


def against(function: Any, w: Whole, **options: Any) -> PolicyLoss:
    """A loss against the generator that sums over tokens."""
    return function(w.now, w.then, w.advantages, w.mask, normalizer=w.tokens, **options)


def decoupled(w: Whole, **options: Any) -> PolicyLoss:
    now = w.now.detach()
    return decoupled_ppo_loss(
        w.now, now, w.then, w.advantages, w.mask, normalizer=w.tokens, **options
    )


def grpo_cases() -> dict[str, Case]:
    kl = {"kl_beta": 0.2, "kl_importance": True}
    gspo: dict[str, Any] = {"clip_low": 0.01, "clip_high": 0.02, "ratio_level": "sequence"}
    bounds = {"correction_maximum": 1.1, "correction_minimum": 0.8}
    cases: dict[str, Case] = {
        "grpo": ({}, lambda w: ratio(grpo_loss, w, clip_low=0.2, clip_high=0.28)),
        "grpo capped": (
            {**CLIPS, "ratio_cap": 1.2},
            lambda w: ratio(grpo_loss, w, ratio_cap=1.2, **CLIPS),
        ),
        "gspo": (
            {**gspo, "aggregation": "grpo"},
            lambda w: ratio(grpo_loss, w, "grpo", **gspo),
        ),
        "grpo kl": (
            {**CLIPS, "kl_beta": 0.2},
            lambda w: ratio(grpo_loss, w, kl_beta=0.2, reference_logprobs=w.reference, **CLIPS),
        ),
        "grpo unbiased kl": (
            {**CLIPS, **kl},
            lambda w: ratio(grpo_loss, w, reference_logprobs=w.reference, **CLIPS, **kl),
        ),
    }
    token: dict[str, Any] = {**CLIPS, "ratio_level": "sequence_token"}
    cases["gspo token"] = (token, lambda w: ratio(grpo_loss, w, **token))
    k2: dict[str, Any] = {**CLIPS, "kl_beta": 0.2, "kl_estimator": "k2"}
    cases["grpo k2"] = (k2, lambda w: ratio(grpo_loss, w, reference_logprobs=w.reference, **k2))
    cases["grpo off policy"] = (
        {**CLIPS, "off_policy_threshold": 1e-3},
        lambda w: ratio(grpo_loss, w, sampling_weights=w.on_policy(1e-3), **CLIPS),
    )
    cases["cispo corrected off policy"] = (
        {"type": "cispo", "correction": "token_mask", "off_policy_threshold": 1e-3, **bounds},
        lambda w: cispo_loss(
            w.now,
            w.now.detach(),
            w.advantages,
            w.mask,
            normalizer=w.tokens,
            sampling_weights=w.weights("token_mask", 1.1, 0.8) * w.on_policy(1e-3),
        ),
    )
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        cases[f"grpo {kind}"] = (
            {**CLIPS, "aggregation": kind},
            lambda w, kind=kind: ratio(grpo_loss, w, kind, **CLIPS),
        )
    for mode in MODES:
        cases[f"grpo {mode}"] = (
            {**CLIPS, "correction": mode, **bounds},
            lambda w, mode=mode: corrected(grpo_loss, w, mode, **CLIPS),
        )
    cases["cispo corrected"] = (
        {"type": "cispo", "correction": "token_mask", **bounds},
        lambda w: corrected(cispo_loss, w, "token_mask", clip_high=4.0),
    )
    return cases


CASES: dict[str, Case] = {
    **grpo_cases(),
    "cispo": (
        {"type": "cispo", "clip_high": 0.1, "clip_low": 0.1},
        lambda w: ratio(cispo_loss, w, clip_high=0.1, clip_low=0.1),
    ),
    "sapo": (
        {"type": "sapo", "tau_positive": 0.5, "tau_negative": 2.0},
        lambda w: ratio(sapo_loss, w, "grpo", tau_positive=0.5, tau_negative=2.0),
    ),
    "sapo kl": (
        {"type": "sapo", "kl_beta": 0.1},
        lambda w: ratio(sapo_loss, w, "grpo", kl_beta=0.1, reference_logprobs=w.reference),
    ),
    "prime_rl": (
        {"type": "prime_rl", "mask_low": 1e-4, "mask_high": 2e-4, "adv_tau": 0.5, "kl_tau": 0.1},
        lambda w: against(prime_rl_loss, w, mask_low=1e-4, mask_high=2e-4, adv_tau=0.5, kl_tau=0.1),
    ),
    "prime_rl teacher": (
        {"type": "prime_rl", "teacher_tau": 0.3},
        lambda w: against(prime_rl_loss, w, teacher_tau=0.3, reference_logprobs=w.reference),
    ),
    "prime_rl_ipo": (
        {"type": "prime_rl_ipo", "threshold": 1e-4, "adv_tau": 0.5, "kl_tau": 0.1},
        lambda w: against(prime_rl_ipo_loss, w, threshold=1e-4, adv_tau=0.5, kl_tau=0.1),
    ),
    "gmpo": (
        {"type": "gmpo", "log_clip_low": 0.02, "log_clip_high": 0.03},
        lambda w: ratio(gmpo_loss, w, "grpo", log_clip_low=0.02, log_clip_high=0.03),
    ),
    "gmpo corrected": (
        {"type": "gmpo", "aggregation": "dapo", "correction": "token_mask"}
        | {"correction_maximum": 1.1, "correction_minimum": 0.8},
        lambda w: corrected(gmpo_loss, w, "token_mask"),
    ),
    "vespo": (
        {"type": "vespo", "k_positive": 1.0, "lambda_negative": 1.0},
        lambda w: ratio(vespo_loss, w, k_positive=1.0, lambda_negative=1.0),
    ),
    "vespo corrected": (
        {"type": "vespo", "correction": "token_truncate"}
        | {"correction_maximum": 1.1, "correction_minimum": 0.8},
        lambda w: corrected(vespo_loss, w, "token_truncate"),
    ),
    "dppo ratio": (
        {"type": "dppo", "divergence": "ratio", "threshold": 0.02, "threshold_high": 0.01},
        lambda w: ratio(
            dppo_loss, w, divergence="ratio", threshold=0.02, threshold_high=0.01, ratio_cap=10.0
        ),
    ),
    "dppo tv": (
        {"type": "dppo", "threshold": 1e-4, "aggregation": "grpo"},
        lambda w: ratio(dppo_loss, w, "grpo", divergence="tv", threshold=1e-4, ratio_cap=10.0),
    ),
    "dppo kl": (
        {"type": "dppo", "divergence": "kl", "threshold": 1e-5, "ratio_cap": 1.1},
        lambda w: ratio(dppo_loss, w, divergence="kl", threshold=1e-5, ratio_cap=1.1),
    ),
    "decoupled_ppo": (
        {
            "type": "decoupled_ppo",
            "dual_clip": 3.0,
            "ratio_level": "sequence",
            "rejection": {"upper": 1.1, "lower": 0.8},
        },
        lambda w: decoupled(
            w, dual_clip=3.0, ratio_level="sequence", rejection=Rejection(upper=1.1, lower=0.8)
        ),
    ),
    "decoupled_ppo clamped": (
        {
            "type": "decoupled_ppo",
            "rejection": {"level": "sequence", "action": "clamp", "upper": 1.02, "lower": 0.98},
        },
        lambda w: decoupled(
            w, rejection=Rejection(level="sequence", action="clamp", upper=1.02, lower=0.98)
        ),
    ),
    "decoupled_ppo by kl": (
        {
            "type": "decoupled_ppo",
            "rejection": {"level": "sequence", "metric": "kl_k2", "agg": "max", "upper": 0.03},
        },
        lambda w: decoupled(
            w, rejection=Rejection(level="sequence", metric="kl_k2", agg="max", upper=0.03)
        ),
    ),
    "reinforce": (
        {"type": "reinforce", "aggregation": "dr_grpo"},
        lambda w: reinforce_loss(
            w.now,
            w.advantages,
            w.mask,
            aggregation="dr_grpo",
            normalizer=w.counts()["dr_grpo"],
        ),
    ),
    "reinforce corrected": (
        {"type": "reinforce", "correction": "sequence_truncate"}
        | {"correction_maximum": 1.1, "correction_minimum": 0.8},
        lambda w: reinforce_loss(
            w.now,
            w.advantages,
            w.mask,
            normalizer=w.tokens,
            sampling_weights=w.weights("sequence_truncate", 1.1, 0.8),
        ),
    ),
}
