"""All ports of training from stored steps as one fake, which notes what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.steps.ports import MayTrain


@dataclass
class Trainer:
    """The ports of `TrainingFromTraces`; `error` fails the next step or sync."""

    losses: dict[int, float] = field(default_factory=dict)
    done: list[tuple[str, int]] = field(default_factory=list)
    version: int = 0
    error: Exception | None = None

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        self._try()
        batch.check_trains(self.version)
        self.version += 1
        self.done.append(("train", batch.step))
        return {"loss/total": self.losses.get(batch.step, 1.0), "policy/grad_norm": 2.0}

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        self._try()
        if on_snapshot is not None:
            on_snapshot()
        self.done.append(("sync", self.version))
        return self.version

    def _try(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    async def save(self, step: int) -> None:
        self.done.append(("save", step))

    async def saved(self) -> None:
        self.done.append(("saved", 0))

    async def plan_step(self, step: int, groups: Sequence[int], manifest: bytes, *_: Any) -> None:
        assert (list(groups), manifest) == ([], b"")
        self.done.append(("plan", step))

    async def end_step(self, step: int, metrics: Any) -> None:
        assert metrics["step"] == step + 1
        self.done.append(("end", step))

    def update(self, step: Mapping[str, Any]) -> None:
        self.done.append(("shown", step["step"]))

    def evaluation(self, evaluation: Evaluation) -> None:
        self.done.append(("evaluated", evaluation.step))

    def phase(self, text: str) -> None:
        self.done.append((text, 0))

    def names(self, *kinds: str) -> list[tuple[str, int]]:
        return [one for one in self.done if one[0] in kinds]
