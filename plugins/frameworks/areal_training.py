"""Three channels on AReaL's `TrainEngine`: decoupled PPO, JSD at hinted tokens, and pairs.

    figures = areal_step(engine, rows, views, pairs, settings)

`train_batch` of an engine hands log-probs to a loss; JSD needs whole logits, so the step is made of
`forward_backward_batch`, whose function gets them. An engine packs rows into microbatches as it
likes: rows are distinguished by the key `composer_row`, and a pair's sides need not meet, since the
gradient of a preference loss by each side's log-prob is known before (one forward more).

Axes: N packed tokens of a microbatch, T tokens of a row, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_mesh.channels.step import POLICY, Term, own_weights, step_loss, step_total
from composer_mesh.losses.distillation import generalized_jsd
from composer_mesh.plugins.frameworks.areal import ppo_actor_loss
from composer_mesh.plugins.frameworks.pair_gradients import check_references, pair_gradients
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample

ROW = "composer_row"
Figures = dict[str, float]


@dataclass(frozen=True)
class ArealChannels:
    """Weights and options of the channels; `ppo` has those of `ppo_actor_loss`."""

    alpha: float = 0.0
    beta: float = 0.0
    jsd_beta: float = 0.5
    dpo_beta: float = 0.1
    temperature: float = 1.0
    ppo: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LogitsRow:
    """One row of a microbatch: its number, its logits [T, V] and its values by key, [T] each."""

    row: int
    logits: Tensor
    values: Mapping[str, Tensor]

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """Return the log-probs [T - 1] of each next id, in nats."""
        scores = self.logits[:-1].float() / temperature
        ids = self.values["input_ids"][1:].long().unsqueeze(-1)
        return scores.log_softmax(-1).gather(-1, ids).squeeze(-1)


def areal_step(
    engine: Any,
    rows: Sequence[Mapping[str, Tensor]],
    views: Mapping[int, Sequence[HintedView]],
    pairs: Sequence[PairSample],
    channels: ArealChannels,
) -> Figures:
    """Run one optimizer step; return `loss/…` of it, over all data-parallel ranks.

    `rows` are results of workflows, [1, T] each, with `advantages` and `prox_logp` in addition to
    what they return; values of a token stand at the token, nothing is rolled. `views` are the
    hinted turns of a row, by its number. Pairs have the log-probs of a reference.
    """
    hinted = [(row, view) for row, own in views.items() for view in own] if channels.alpha else []
    pairs = pairs if channels.beta else ()
    counts = _counts(engine, rows, hinted, pairs)
    teacher = _teacher_logits(engine, [view for _, view in hinted])
    sides = [side for pair in pairs for side in _sides(pair)]
    pulls, losses = _pulls(engine, pairs, sides, channels, counts["pairs"])
    by_row: dict[int, list[tuple[HintedView, Tensor]]] = {}
    for place, (row, view) in enumerate(hinted):
        by_row.setdefault(row, []).append((view, teacher[place]))

    def loss(piece: LogitsRow) -> Tensor:
        if piece.row >= len(rows):
            side = piece.row - len(rows)
            return pulls[side] * _answer(piece, sides[side]).sum()
        terms: dict[str, Term] = {POLICY: lambda: _policy(piece, channels) / counts["tokens"]}
        if piece.row in by_row:
            terms["sdpo"] = lambda: _hinted(piece, by_row[piece.row], channels) / counts["hinted"]
        found = step_loss(terms, own_weights(channels.alpha, channels.beta))
        for name, one in found.losses.items():
            losses[name] += float(one)
        return found.total()

    engine.optimizer_zero_grad()
    ranks = dist.get_world_size(engine.data_parallel_group)
    every = [*map(dict, rows), *(_row(ids) for ids, _ in sides)]
    _run(engine, every, lambda piece: ranks * loss(piece))
    stats = engine.optimizer_step()
    found = _summed(engine, losses)
    total = step_total(found, own_weights(channels.alpha, channels.beta))
    figures = {f"loss/{name}": value for name, value in found.items()}
    return {**figures, "loss/total": total, **{k: float(v) for k, v in stats.items()}}


def _run(
    engine: Any,
    rows: Sequence[dict[str, Tensor]],
    use: Callable[[LogitsRow], Tensor | None],
    forward_only: bool = False,
) -> None:
    """Have the engine compute rows in its own microbatches, and use each."""
    if not rows:
        return
    numbered = [
        {**row, ROW: torch.full_like(row["input_ids"], place)} for place, row in enumerate(rows)
    ]

    def process(logits: Tensor, context: dict[str, Any]) -> Tensor | None:
        losses = [use(piece) for piece in pieces(logits, context["mb_input"])]
        kept = [one for one in losses if one is not None]
        return torch.stack(kept).sum() if kept else None if forward_only else logits.sum() * 0

    whole = _with_all_keys(numbered)
    for together in [whole] if _keeps_rows_apart(engine) else [[row] for row in whole]:
        batched, _ = engine._normalize_batch_input(together)
        parts = engine._prepare_mb_list(batched).to(engine.device)
        engine.forward_backward_batch(parts, process, forward_only=forward_only)


def _keeps_rows_apart(engine: Any) -> bool:
    """Whether packed rows do not see each other: of AReaL's attentions only in flash attention.

    Others get one row at a time. Raises ValueError where ranks would then differ in forwards.
    """
    attention = engine.config.attn_impl
    if "flash" in attention:
        return True
    if dist.get_world_size(engine.data_parallel_group) > 1:
        raise ValueError(
            f"attn_impl is {attention!r}, in which the rows that AReaL packs see each other: set "
            "it to 'flash_attention_2', or use one data-parallel rank"
        )
    return False


def pieces(logits: Tensor, inputs: Mapping[str, Any]) -> Iterator[LogitsRow]:
    """Yield the rows of a packed microbatch, from its logits [N, V] and its values [N]."""
    numbers = inputs[ROW].reshape(-1)
    at = 0
    rows, lengths = torch.unique_consecutive(numbers, return_counts=True)
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        place = slice(at, at + length)
        values = {
            name: value.reshape(-1)[place]
            for name, value in inputs.items()
            if isinstance(value, Tensor) and value.numel() == numbers.numel()
        }
        yield LogitsRow(row, logits[place], values)
        at += length


def _with_all_keys(rows: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Give every row every key of tokens, 0 where it had none: an engine batches equal keys."""
    kinds = {name: one.dtype for row in rows for name, one in row.items() if one.dim() == 2}
    return [
        {
            name: row.get(name, torch.zeros(row["input_ids"].shape, dtype=kind))
            for name, kind in kinds.items()
        }
        for row in rows
    ]


def _row(ids: Sequence[int]) -> dict[str, Tensor]:
    found = torch.tensor([list(ids)], dtype=torch.int32)
    return {"input_ids": found, "attention_mask": torch.ones_like(found, dtype=torch.bool)}


def _policy(piece: LogitsRow, channels: ArealChannels) -> Tensor:
    """Return the decoupled PPO loss of a row, a sum over its tokens."""
    values = {name: value[1:] for name, value in piece.values.items()}
    mask = values["loss_mask"].bool()
    mean = ppo_actor_loss(
        piece.logprobs(channels.temperature),
        values["prox_logp"],
        values["logprobs"],
        values["advantages"],
        mask,
        **channels.ppo,
    )
    return mean * max(1, int(mask.sum()))


def _hinted(
    piece: LogitsRow, views: Sequence[tuple[HintedView, Tensor]], channels: ArealChannels
) -> Tensor:
    """Return the divergence of a row's hinted turns, a sum over their tokens."""
    student = torch.cat([piece.logits[view.student_rows] for view, _ in views])
    return generalized_jsd(
        student,
        torch.cat([teacher for _, teacher in views]),
        torch.ones(len(student), dtype=torch.bool, device=student.device),
        jsd_beta=channels.jsd_beta,
        temperature=channels.temperature,
        normalizer=1,
    )


def _teacher_logits(engine: Any, views: Sequence[HintedView]) -> dict[int, Tensor]:
    """Return the engine's own logits [n, V] at the teacher's rows of each view."""
    found: dict[int, Tensor] = {}

    def keep(piece: LogitsRow) -> None:
        found[piece.row] = piece.logits[views[piece.row].teacher_rows].detach()

    with torch.no_grad():
        _run(engine, [_row(view.teacher_ids) for view in views], keep, forward_only=True)
    return found


Side = tuple[list[int], int]
"""The ids of a side, and how many of them are its context."""


def _sides(pair: PairSample) -> tuple[Side, Side]:
    context = len(pair.context_ids)
    return (
        ([*pair.context_ids, *pair.chosen_ids], context),
        ([*pair.context_ids, *pair.rejected_ids], context),
    )


def _answer(piece: LogitsRow, side: Side) -> Tensor:
    return piece.logprobs()[side[1] - 1 :]


def _pulls(
    engine: Any,
    pairs: Sequence[PairSample],
    sides: Sequence[Side],
    channels: ArealChannels,
    count: int,
) -> tuple[list[float], Figures]:
    """Return beta * the gradient of the preference loss by each side's log-prob, and the loss."""
    losses = {"policy": 0.0, "sdpo": 0.0, "replay": 0.0}
    if not pairs:
        return [], losses
    check_references(pairs)
    sums: dict[int, float] = {}

    def add(piece: LogitsRow) -> None:
        sums[piece.row] = float(_answer(piece, sides[piece.row]).sum())

    with torch.no_grad():
        _run(engine, [_row(ids) for ids, _ in sides], add, forward_only=True)
    losses["replay"], gradient = pair_gradients(
        torch.tensor([sums[place] for place in range(len(sides))]),
        pairs,
        weight=channels.beta,
        dpo_beta=channels.dpo_beta,
        normalizer=count,
    )
    return gradient.tolist(), losses


def _counts(
    engine: Any,
    rows: Sequence[Mapping[str, Tensor]],
    hinted: Sequence[tuple[int, HintedView]],
    pairs: Sequence[PairSample],
) -> dict[str, int]:
    """Return what each channel is divided by, over all ranks."""
    own = {
        "tokens": float(sum(int(row["loss_mask"].sum()) for row in rows)),
        "hinted": float(sum(len(view.targets) for _, view in hinted)),
        "pairs": float(len(pairs)),
    }
    return {name: max(1, int(value)) for name, value in _summed(engine, own).items()}


def _summed(engine: Any, figures: Mapping[str, float]) -> Figures:
    values = torch.tensor(list(figures.values()), dtype=torch.float64, device=engine.device)
    if dist.get_world_size(engine.data_parallel_group) > 1:
        dist.all_reduce(values, group=engine.data_parallel_group)
    return dict(zip(figures, values.tolist(), strict=True))
