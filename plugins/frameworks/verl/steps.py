"""Optimizer steps of three channels on an engine of verl, and pairs as a mini-batch of their own.

    figures = verl_step(engine, rows, pairs, channels, actor)
    figures = verl_pair_step(engine, pairs, channels)

The engine is its own teacher: hinted contexts are one forward without gradients before. The sides
of a pair need not share a microbatch: the gradient of a preference loss by each side's log-prob is
known before, from one forward more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_mesh.channels.step import own_weights, step_total
from composer_mesh.plugins.frameworks.pair_gradients import check_references, pair_gradients
from composer_mesh.plugins.frameworks.verl.agent_loop import view_of
from composer_mesh.plugins.frameworks.verl.losses import (
    HINT_IDS,
    HINT_LOGPROBS,
    HINT_ROWS,
    HINT_TOKENS,
    NUMBER,
    PULL,
    PolicyAndSdpoLoss,
    TeacherSignals,
    VerlChannels,
    answer_logprobs,
    jagged,
    pull_loss,
)
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample

Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One rollout: its prompt, and for each response id its mask, old log-prob and advantage."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    old_log_probs: Sequence[float]
    advantages: Sequence[float]
    views: Sequence[HintedView] = field(default=())

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.response_ids]


def verl_rows(data: Any) -> list[Row]:
    """Return the rows of a `DataProto` of verl, padded as its agent loops and estimators leave it.

    Its batch has `advantages` and `old_log_probs`; `hint_views` of `TaskAgentLoop` become views.
    """
    batch, prompt = data.batch, data.batch["prompts"].shape[1]
    shown, views = batch["attention_mask"].bool(), data.non_tensor_batch.get("hint_views")
    found = []
    for row in range(len(shown)):
        answer = shown[row, prompt:]
        columns = {
            name: batch[name][row][answer].tolist()
            for name in ("response_mask", "old_log_probs", "advantages")
        }
        ids = batch["responses"][row][answer].tolist()
        own = [] if views is None else [view_of(one) for one in views[row] or ()]
        prompt_ids = batch["prompts"][row][shown[row, :prompt]].tolist()
        found.append(Row(prompt_ids, ids, **columns, views=own))
    return found


def verl_step(
    engine: Any,
    rows: Sequence[Row],
    pairs: Sequence[PairSample],
    channels: VerlChannels,
    actor: Any,
    temperature: float = 1.0,
) -> Figures:
    """Run one optimizer step of all channels; return `loss/…` of it, over all data-parallel ranks.

    `actor` is verl's ActorConfig, whose policy loss is trained. Pairs have the log-probs of a
    reference. Call it on every rank, inside `engine.train_mode()`, each with rows of its own.
    Raises ValueError where no id of any rank is trained.
    """
    if not _sum(engine, sum(sum(row.response_mask) for row in rows)):
        raise ValueError("no response id of the step is trained, so it has no loss: leave it out")
    engine.optimizer_zero_grad()
    found = {"policy": 0.0, "sdpo": 0.0, **_rollouts(engine, rows, channels, actor, temperature)}
    found["replay"] = _pairs(engine, pairs, channels) if channels.beta else 0.0
    figures = {f"loss/{name}": value for name, value in found.items()}
    total = step_total(found, own_weights(channels.alpha, channels.beta))
    return {**figures, "loss/total": total, "grad_norm": float(engine.optimizer_step())}


def verl_pair_step(engine: Any, pairs: Sequence[PairSample], channels: VerlChannels) -> Figures:
    """Run one optimizer step of pairs, a mini-batch of their own; return its `loss/replay`."""
    if not channels.beta > 0:
        raise ValueError(
            f"beta is {channels.beta}, so pairs teach nothing: set it above 0, as 0.05"
        )
    engine.optimizer_zero_grad()
    loss = _pairs(engine, pairs, channels)
    return {"loss/replay": loss, "grad_norm": float(engine.optimizer_step())}


def _rollouts(
    engine: Any, rows: Sequence[Row], channels: VerlChannels, actor: Any, temperature: float
) -> Figures:
    """Add the gradients of the policy and the SDPO loss; return both losses."""
    columns = _columns([(row.prompt_ids, row.response_ids) for row in rows])
    columns["response_mask"] = jagged([torch.tensor(row.response_mask) for row in rows])
    columns["loss_mask"] = columns["response_mask"]
    for name in ("old_log_probs", "advantages"):
        values = [torch.tensor(getattr(row, name), dtype=torch.float32) for row in rows]
        columns[name] = jagged(values)
    settings = {"temperature": temperature, "global_batch_size": _sum(engine, len(rows))}
    hinted = _sum(engine, sum(len(view.targets) for row in rows for view in row.views))
    if channels.alpha and hinted:
        columns |= _signals(engine, rows, channels, temperature)
        settings |= {HINT_TOKENS: hinted, "distillation_use_topk": True}
    loss = PolicyAndSdpoLoss(actor, channels)
    found = engine.forward_backward_batch(_batch(engine, columns, settings), loss)["metrics"]
    ranks = engine.get_data_parallel_size()
    return {
        name: _sum(engine, sum(found[f"loss/{name}"])) / ranks
        for name in ("policy", "sdpo")
        if f"loss/{name}" in found
    }


def _signals(
    engine: Any, rows: Sequence[Row], channels: VerlChannels, temperature: float
) -> dict[str, Tensor]:
    """Return the teacher's columns of a batch: where it is read, and its log-probs there."""
    views = [view for row in rows for view in row.views]
    read = [(view.teacher_ids, view.teacher_rows) for view in views]
    # Every rank has to compute; one without hints reads a row of its own, and keeps nothing of it.
    read = read or [(rows[0].ids, [])]
    columns = _columns([(ids[:1], ids[1:]) for ids, _ in read])
    columns[HINT_ROWS] = jagged([torch.tensor(places, dtype=torch.long) for _, places in read])
    columns[NUMBER] = torch.arange(len(read))
    columns["loss_mask"] = columns["response_mask"]
    settings = {"temperature": temperature, "distillation_use_topk": True}
    teacher = TeacherSignals(channels.top_k)
    engine.infer_batch(_batch(engine, columns, settings), teacher)
    return _student_columns(rows, teacher.found)


def _student_columns(
    rows: Sequence[Row], found: Mapping[int, tuple[Tensor, Tensor | None]]
) -> dict[str, Tensor]:
    scores, ids = next(iter(found.values()))
    places, values, kept = [], [], []
    numbers = iter(range(len(found)))
    for row in rows:
        own = [found[next(numbers)] for _ in row.views]
        at = [place for view in row.views for place in view.student_rows]
        places.append(torch.tensor(at, dtype=torch.long))
        values.append(torch.cat([scores[:0], *(one for one, _ in own)]))
        if ids is not None:
            kept.append(torch.cat([ids[:0], *(one for _, one in own if one is not None)]))
    columns = {HINT_ROWS: jagged(places), HINT_LOGPROBS: jagged(values)}
    return columns if ids is None else {**columns, HINT_IDS: jagged(kept)}


def _pairs(engine: Any, pairs: Sequence[PairSample], channels: VerlChannels) -> float:
    """Add the gradient of beta * the preference loss; return the loss, over all ranks."""
    count = int(_sum(engine, len(pairs)))
    if not count:
        return 0.0
    if not pairs:
        raise ValueError(
            "a data-parallel rank has no pair but others have: give every rank one at least, since "
            "all ranks have to compute together"
        )
    check_references(pairs)
    columns = _columns(
        [(pair.context_ids, ids) for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    )
    columns["loss_mask"] = columns["response_mask"]
    batch = _batch(engine, columns, {"temperature": 1.0})
    output = engine.infer_batch(batch)["model_output"]
    loss, pulls = pair_gradients(
        answer_logprobs(output, columns),
        pairs,
        weight=channels.beta,
        dpo_beta=channels.dpo_beta,
        normalizer=count,
    )
    columns[PULL] = pulls * engine.get_data_parallel_size()
    engine.forward_backward_batch(_batch(engine, columns, {"temperature": 1.0}), pull_loss)
    return _sum(engine, loss)


def _columns(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
    """Return verl's columns without padding, of rows of a prompt and a response each."""
    ids = [torch.tensor([*prompt, *response]) for prompt, response in rows]
    return {
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(len(one)) for one in ids]),
        "prompts": jagged([torch.tensor(list(prompt)) for prompt, _ in rows]),
        "responses": jagged([torch.tensor(list(response)) for _, response in rows]),
        "response_mask": jagged(
            [torch.ones(len(response), dtype=torch.long) for _, response in rows]
        ),
    }


def _batch(engine: Any, columns: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Any:
    """Return a batch for the engine, which it divides into microbatches as it is configured."""
    from verl.utils.tensordict_utils import get_tensordict

    config = engine.engine_config
    own = {
        "use_remove_padding": config.use_remove_padding,
        "use_dynamic_bsz": config.use_dynamic_bsz,
        "max_token_len_per_gpu": config.max_token_len_per_gpu,
        "micro_batch_size_per_gpu": config.micro_batch_size_per_gpu,
        "use_fused_kernels": False,  # they make no logits
    }
    return get_tensordict(dict(columns), {**own, **settings})


def _sum(engine: Any, value: float) -> Any:
    """Return the sum over data-parallel ranks, of the type of the value."""
    if engine.get_data_parallel_size() == 1:
        return value
    found = torch.tensor(value, dtype=torch.float64, device=_device(engine))
    dist.all_reduce(found, group=engine.get_data_parallel_group())
    return type(value)(found.item())


def _device(engine: Any) -> Any:
    return next(engine.module.parameters()).device
