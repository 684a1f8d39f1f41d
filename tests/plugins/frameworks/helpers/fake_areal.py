"""AReaL's engine and request types by their recorded names, over a tiny model of this project."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

RECORDED = json.loads((Path(__file__).parents[1] / "unit" / "recorded" / "areal.json").read_text())


def recorded_class(name: str) -> Any:
    """A class with the fields that AReaL's has, each with a default."""
    fields = [(one, Any, field(default=None)) for one in RECORDED["fields"][name]]
    return make_dataclass(name, fields)


@dataclass
class Microbatches:
    """Rows of a batch, two to a microbatch, as AReaL packs them."""

    mbs: list[dict[str, Any]]

    def to(self, _device: Any) -> Microbatches:
        return self


@dataclass
class FakeEngine:
    """The part of AReaL's `FSDPEngine` that a step of three channels calls."""

    model: Any
    rate: float
    attention: str = "flash_attention_2"
    device: str = "cpu"
    data_parallel_group: Any = None
    forwards: int = 0

    @property
    def config(self) -> Any:
        return SimpleNamespace(attn_impl=self.attention)

    def optimizer_zero_grad(self) -> None:
        self.model.zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        with torch.no_grad():
            for weights in self.model.parameters():
                if weights.grad is not None:
                    weights -= self.rate * weights.grad
        return {"grad_norm": 1.0}

    def _normalize_batch_input(self, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], None]:
        assert len({tuple(row) for row in rows}) == 1, "rows have equal keys"
        width = max(row["input_ids"].shape[1] for row in rows)
        padded = [
            {
                name: torch.nn.functional.pad(one, (0, width - one.shape[1]))
                for name, one in r.items()
            }
            for r in rows
        ]
        return {name: torch.cat([row[name] for row in padded]) for name in rows[0]}, None

    def _prepare_mb_list(self, batch: dict[str, Any]) -> Microbatches:
        shown = batch["attention_mask"].bool()
        parts = [slice(at, at + 2) for at in range(0, len(shown), 2)]
        return Microbatches(
            [{name: one[p][shown[p]] for name, one in batch.items()} for p in parts]
        )

    def forward_backward_batch(
        self, mb_list: Microbatches, process_output_fn: Callable[..., Any], forward_only: bool
    ) -> None:
        for packed in mb_list.mbs:
            self.forwards += 1
            ids = packed["input_ids"].long()
            starts = [0, *(torch.diff(packed["composer_row"]) != 0).nonzero()[:, 0].add(1).tolist()]
            ends = [*starts[1:], len(ids)]
            logits = torch.cat(
                [
                    self.model(input_ids=ids[a:b][None], use_cache=False).logits[0]
                    for a, b in zip(starts, ends, strict=True)
                ]
            )
            logits = torch.cat([logits, logits.new_zeros(3, logits.shape[1])])  # padding
            loss = process_output_fn(logits, {"mb_input": packed, "pad_length": 3})
            if not forward_only and loss is not None:
                loss.backward()


def row_of(model: Any, one: Any) -> dict[str, torch.Tensor]:
    """A sample as a workflow of AReaL returns it, with what its trainer adds."""
    ids = torch.tensor([one.ids])
    with torch.no_grad():
        scores = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    proximal = scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    columns = {
        "logprobs": one.logprobs,
        "prox_logp": [0.0, *proximal],
        "advantages": [one.advantage] * len(one.ids),
    }
    return {
        "input_ids": ids.int(),
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_mask": torch.tensor([one.mask]).int(),
        **{name: torch.tensor([column]) for name, column in columns.items()},
    }
