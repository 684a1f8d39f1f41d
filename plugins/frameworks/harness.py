"""A verification harness: the three channels on one causal LM and one batch of tensors.

For CPU smoke tests, comparisons and debugging. It computes whole logits, runs the teacher in the
same process and puts LM cross-entropy in the place of the policy channel; the trainer does none
of that. Model and batch come from the caller; nothing is stepped.

Axes: B rows, T tokens of a row, S tokens of a teacher's row, P pairs, U = T - 1 tokens that have a
prediction, N marked tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_mesh.channels.step import POLICY, Term, checked_weight, own_weights, step_loss
from composer_mesh.losses.distillation import entropy_gated_kl, generalized_jsd, taid_loss
from composer_mesh.losses.logprobs import token_logprobs
from composer_mesh.losses.preference import (
    PreferenceLoss,
    dpo_loss,
    ipo_loss,
    sequence_logprobs,
    simpo_loss,
)
from composer_mesh.losses.reductions import Number, check_choice, masked_sum

Batch = Mapping[str, Tensor]
Objective = Literal["none", "taid", "entropy_opd"]
Variant = Literal["dpo", "ipo", "simpo"]
SIDES = ("chosen", "rejected")
NAMES = {POLICY: "lm_ce", "sdpo": "sdpo_jsd", "replay": "replay"}
"""Field of each channel's loss, in their order."""


@dataclass(frozen=True)
class ComposedLoss:
    """The total loss, and each channel's own loss: unweighted, detached, None if off.

    `off` gives the reason for each channel that is off, by the name of its field.
    """

    total: Float[Tensor, ""]
    lm_ce: Float[Tensor, ""] | None
    sdpo_jsd: Float[Tensor, ""] | None
    replay: Float[Tensor, ""] | None
    off: dict[str, str] = field(default_factory=dict)


def compose_loss(
    model: Any,
    batch: Batch,
    *,
    alpha_sdpo: Number,
    beta_replay: Number,
    sdpo_wrapper: Objective = "none",
    taid_t: Number | None = None,
    entropy_opd_h_max: Number | None = None,
    dpo_variant: Variant = "dpo",
    simpo_beta: Number = 2.0,
    simpo_gamma: Number = 0.5,
    jsd_beta: Number = 0.5,
    temperature: Number = 1.0,
    dpo_beta: Number = 0.1,
    normalizers: Mapping[str, Number] | None = None,
) -> ComposedLoss:
    """LM cross-entropy + alpha_sdpo * self-distillation + beta_replay * preference.

    `model` is any Hugging Face causal LM. Rows are padded on the right, if at all; a mask marks
    tokens that are to be predicted, each from the logits one position before, so that the first
    token of a row never counts. The batch holds:

        input_ids, response_mask [B T]         the rows; lm_ce is their mean cross-entropy in nats
        ctx_teacher_input_ids [B S],           the rows with a hint, and which tokens of `input_ids`
        sdpo_loss_mask [B T]                   to distil
        ctx_teacher_loss_mask [B S]            optional: the same tokens in the teacher's rows; left
                                               out, rows agree from their right ends
        dpo_chosen_input_ids [P T'], …         pairs: ids, mask of the answer, and log-probs of the
        dpo_chosen_response_mask,              frozen reference, summed [P] or by token [P T'],
        dpo_chosen_ref_logprobs,               where position t is about token t; the same with
                                               `rejected`, whose T' may differ. SimPO reads no
                                               ref_logprobs

    Masks are boolean, or integers of only 0 and 1. A channel whose weight is 0 or whose inputs are
    absent is off: it costs no forward and `off` says why. The teacher is the same model without
    gradient: put it into eval mode, or dropout differs between the two.

    `sdpo_wrapper` "none" is the generalized JSD with `jsd_beta`; "taid" the cross-entropy to the
    target at `taid_t`; "entropy_opd" our soft gate `entropy_gated_kl` with `entropy_opd_h_max`
    (None: log V). `dpo_beta` is that of DPO and IPO (averaged log-probs). Each channel is divided
    by its own count (tokens, tokens, pairs), or by `normalizers[name]` of the whole batch, so that
    losses of microbatches add up.

    Raises ValueError for an unknown objective or variant, a missing `taid_t`, shapes that do not
    fit, and rows of the teacher whose marked ids are not the student's.
    """
    check_choice("sdpo_wrapper", sdpo_wrapper, ("none", "taid", "entropy_opd"))
    check_choice("dpo_variant", dpo_variant, ("dpo", "ipo", "simpo"))
    if sdpo_wrapper == "taid" and taid_t is None:
        raise ValueError("taid_t is None but sdpo_wrapper is 'taid': pass t in [0, 1]")
    objectives: dict[str, Callable[..., Tensor]] = {
        "none": partial(generalized_jsd, jsd_beta=jsd_beta, temperature=temperature),
        "taid": partial(taid_loss, t=0.0 if taid_t is None else taid_t, temperature=temperature),
        "entropy_opd": partial(entropy_gated_kl, h_max=entropy_opd_h_max, temperature=temperature),
    }
    variants: dict[str, Callable[..., PreferenceLoss]] = {
        "dpo": partial(dpo_loss, beta=dpo_beta),
        "ipo": partial(ipo_loss, beta=dpo_beta),
        "simpo": partial(simpo_loss, beta=simpo_beta, gamma=simpo_gamma),
    }
    objective, preference = objectives[sdpo_wrapper], variants[dpo_variant]
    weights = own_weights(alpha_sdpo, beta_replay)
    for name, weight in weights.items():
        checked_weight(name, weight)
    off, counts, terms = _off(batch, alpha_sdpo, beta_replay, dpo_variant), normalizers or {}, {}
    if not {"lm_ce", "sdpo_jsd"} <= off.keys():
        logits = _logits(model, batch["input_ids"])
        terms[POLICY] = lambda: _lm_ce(logits, batch, counts.get("lm_ce"))
        terms["sdpo"] = lambda: _distil(*_aligned(model, logits, batch), objective, counts)
    terms["replay"] = lambda: _prefer(model, batch, dpo_variant, preference, counts)
    on: dict[str, Term] = {name: one for name, one in terms.items() if NAMES[name] not in off}
    found = step_loss(on, weights)
    lm_ce, sdpo, replay = (found.losses.get(name) for name in NAMES)
    return ComposedLoss(found.total(), lm_ce, sdpo, replay, off)


def _off(batch: Batch, alpha: Number, beta: Number, variant: Variant) -> dict[str, str]:
    """Return why channels are off, by name."""
    parts = ("input_ids", "response_mask") + (() if variant == "simpo" else ("ref_logprobs",))
    needs = {
        "lm_ce": (1.0, ("input_ids", "response_mask")),
        "sdpo_jsd": (alpha, ("input_ids", "ctx_teacher_input_ids", "sdpo_loss_mask")),
        "replay": (beta, tuple(f"dpo_{side}_{part}" for side in SIDES for part in parts)),
    }
    weights = {"sdpo_jsd": "alpha_sdpo", "replay": "beta_replay"}
    off = {}
    for name, (weight, keys) in needs.items():
        absent = [key for key in keys if key not in batch]
        if weight == 0:
            off[name] = f"{weights[name]} is 0"
        elif absent:
            off[name] = f"the batch has no {', '.join(absent)}"
    return off


def _logits(model: Any, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _mask(batch: Batch, key: str, like: str) -> Bool[Tensor, "B U"]:
    """Return the mask of tokens that have a prediction: all but the first of each row."""
    mask, ids = batch[key], batch[like]
    if mask.shape != ids.shape:
        raise ValueError(
            f"{key} has shape {tuple(mask.shape)} but {like} {tuple(ids.shape)}: mark every token"
        )
    if mask.dtype != torch.bool:
        if mask.is_floating_point() or not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"{key} is {mask.dtype} with other values than 0 and 1 but must be a mask:"
                " labels with -100 are none, pass labels != -100"
            )
        mask = mask.bool()
    return mask[:, 1:]


def _lm_ce(
    logits: Float[Tensor, "B T V"], batch: Batch, normalizer: Number | None
) -> Float[Tensor, ""]:
    mask = _mask(batch, "response_mask", "input_ids")
    logprobs = token_logprobs(logits[:, :-1], batch["input_ids"][:, 1:])
    count = int(mask.sum()) if normalizer is None else normalizer
    return masked_sum(-logprobs, mask, count)


def _aligned(
    model: Any, logits: Float[Tensor, "B T V"], batch: Batch
) -> tuple[Float[Tensor, "N V"], Float[Tensor, "N V"]]:
    """Return the student and teacher rows that predict the same tokens."""
    ids, teacher_ids = batch["input_ids"], batch["ctx_teacher_input_ids"]
    if len(ids) != len(teacher_ids):
        raise ValueError(
            f"input_ids has {len(ids)} rows but ctx_teacher_input_ids {len(teacher_ids)}:"
            " give each row a teacher's row"
        )
    mask = _mask(batch, "sdpo_loss_mask", "input_ids")
    if "ctx_teacher_loss_mask" in batch:
        teacher_mask = _mask(batch, "ctx_teacher_loss_mask", "ctx_teacher_input_ids")
    else:
        teacher_mask = _from_the_right(mask, teacher_ids.shape[1] - 1)
    _check_same(ids[:, 1:], mask, teacher_ids[:, 1:], teacher_mask)
    with torch.no_grad():
        teacher = _logits(model, teacher_ids)
    return logits[:, :-1][mask], teacher[:, :-1][teacher_mask]


def _from_the_right(mask: Bool[Tensor, "B U"], length: int) -> Bool[Tensor, "B S"]:
    """Return the mask for rows of another length that end with the same tokens."""
    found = mask.new_zeros(len(mask), length)
    shared = min(length, mask.shape[1])
    if shared:
        found[:, -shared:] = mask[:, -shared:]
    return found


def _check_same(
    ids: Int[Tensor, "B U"],
    mask: Bool[Tensor, "B U"],
    teacher_ids: Int[Tensor, "B S"],
    teacher_mask: Bool[Tensor, "B S"],
) -> None:
    for row, (own, others) in enumerate(zip(mask, teacher_mask, strict=True)):
        if ids[row][own].tolist() != teacher_ids[row][others].tolist():
            raise ValueError(
                f"row {row} marks {int(own.sum())} tokens in sdpo_loss_mask, which are not those of"
                " ctx_teacher_input_ids: end both with the same tokens, or mark the teacher's in"
                " ctx_teacher_loss_mask"
            )


def _distil(
    student: Float[Tensor, "N V"],
    teacher: Float[Tensor, "N V"],
    objective: Callable[..., Tensor],
    counts: Mapping[str, Number],
) -> Float[Tensor, ""]:
    marked = torch.ones_like(student[:, 0], dtype=torch.bool)
    normalizer = counts.get("sdpo_jsd", len(student))
    return objective(student, teacher, marked, normalizer=normalizer)


def _prefer(
    model: Any,
    batch: Batch,
    variant: Variant,
    preference: Callable[..., PreferenceLoss],
    counts: Mapping[str, Number],
) -> Float[Tensor, ""]:
    normalizer = counts.get("replay", len(batch["dpo_chosen_input_ids"]))
    masks = [_mask(batch, f"dpo_{side}_response_mask", f"dpo_{side}_input_ids") for side in SIDES]
    marked = list(zip(SIDES, masks, strict=True))
    sides = [_answers(model, batch, side, mask) for side, mask in marked]
    if variant != "simpo":
        sides += [_reference(batch, side, mask) for side, mask in marked]
    if variant != "dpo":
        sides += [mask.sum(-1) for mask in masks]
    return preference(*sides, normalizer=normalizer).loss


def _answers(model: Any, batch: Batch, side: str, mask: Bool[Tensor, "P U"]) -> Float[Tensor, "P"]:
    ids = batch[f"dpo_{side}_input_ids"]
    return sequence_logprobs(token_logprobs(_logits(model, ids)[:, :-1], ids[:, 1:]), mask)


def _reference(batch: Batch, side: str, mask: Bool[Tensor, "P U"]) -> Float[Tensor, "P"]:
    """Return the summed log-probs of the reference, from sums or from tokens."""
    key = f"dpo_{side}_ref_logprobs"
    logprobs = batch[key]
    if logprobs.shape == mask.shape[:1]:
        return logprobs
    if logprobs.shape == batch[f"dpo_{side}_input_ids"].shape:
        return sequence_logprobs(logprobs[:, 1:], mask)
    raise ValueError(
        f"{key} has shape {tuple(logprobs.shape)} but there are {len(mask)} answers of"
        f" {mask.shape[1] + 1} tokens: pass one sum for each answer, or a number for each token"
    )
