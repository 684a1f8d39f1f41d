"""The state of one client's model: its numbers, their gradients, AdamW's moments, and its file.

    weights [P], gradient [P] or none, exp_avg [P], exp_avg_sq [P], steps, position

All of a model's trained numbers are one flat tensor, so that a step is a few operations and a state
is one small file. A file is complete or absent.

The numbers are complete on each rank, or sharded by FSDP2; files have all of them, one weight after
another, whatever the number of ranks that wrote them.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from composer_mesh.actors.checkpoints.manifest import to_disk
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import from_rows, local, rows_of
from composer_mesh.plugins.tinker.models.messages import AdamParams, ModelSpec


class Numbers:
    """How numbers of one model are divided: here all of them are on each rank, and equal there."""

    total: int | None = None
    """How many there are on all ranks; None where those of this rank are all."""

    def whole(self, own: Tensor) -> Tensor:
        """Return all numbers on the first rank; elsewhere maybe none."""
        return own

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's of all numbers."""
        return whole

    def norm(self, own: Tensor) -> float:
        """Return the norm of all numbers, the same on each rank."""
        return float(own.norm(dtype=torch.float64))

    def everywhere(self, flag: bool) -> bool:
        """Whether a flag is set on every rank."""
        return flag


class ShardedNumbers(Numbers):
    """Each rank has its rows of each weight, as FSDP2 shards them.

    All ranks make all calls, which raise `RanksLost`.
    """

    def __init__(self, weights: Sequence[Any], ranks: Ranks) -> None:
        self._weights, self._ranks = list(weights), ranks
        self.sizes = [local(one).numel() for one in self._weights]
        """Numbers of each weight on this rank."""
        self.total = sum(one.numel() for one in self._weights)

    @torch.no_grad()
    def whole(self, own: Tensor) -> Tensor:
        parts = []
        for part, weight in zip(own.split(self.sizes), self._weights, strict=True):
            rows: Any = from_rows(part.view_as(local(weight)), weight, weight.shape)
            with self._ranks.waiting_for_each_other():
                gathered: Tensor = rows.full_tensor()
            if self._ranks.rank == 0:
                parts.append(gathered.reshape(-1).to("cpu"))
        return torch.cat(parts) if parts else own.new_empty(0)

    @torch.no_grad()
    def own(self, whole: Tensor) -> Tensor:
        parts = whole.split([one.numel() for one in self._weights])
        cut = [
            local(rows_of(part.view(weight.shape), weight)).reshape(-1)
            for part, weight in zip(parts, self._weights, strict=True)
        ]
        return torch.cat(cut)

    def norm(self, own: Tensor) -> float:
        own_square = float(own.square().sum(dtype=torch.float64))
        with self._ranks.waiting_for_each_other():
            return math.sqrt(sum(self._ranks.gather(own_square)))

    def everywhere(self, flag: bool) -> bool:
        with self._ranks.waiting_for_each_other():
            return all(self._ranks.gather(flag))


FORMAT = "composer-mesh.model-state.1"
MOMENTS = ("exp_avg", "exp_avg_sq")


class UnusableState(ValueError):
    """A file that holds no state for this model: its path, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)

    def __str__(self) -> str:
        return f"{Path(self.args[0]).name} holds no state for this model: {self.args[1]}"


@dataclass
class StoredState:
    """What a file holds; without moments where only weights were saved."""

    spec: ModelSpec
    position: int
    steps: int
    tensors: dict[str, Tensor]


class ModelState:
    """The trained numbers of a model, from which AdamW makes the next ones.

    Of numbers that are divided over ranks, each rank has its own, and all ranks make all calls.
    """

    def __init__(self, spec: ModelSpec, weights: Tensor, numbers: Numbers) -> None:
        self.spec, self.position, self.steps, self._numbers = spec, 0, 0, numbers
        self.weights = nn.Parameter(weights)
        self.gradient: Tensor | None = None
        self._optimizer = torch.optim.AdamW([self.weights], foreach=False)

    def accumulate(self, gradient: Tensor) -> bool:
        """Add a gradient [P] to those since the last step; False, and unchanged, if not finite."""
        total = gradient.clone() if self.gradient is None else self.gradient + gradient
        if not self._numbers.everywhere(bool(total.isfinite().all())):
            return False
        self.gradient = total
        return True

    def step(self, adam: AdamParams) -> dict[str, float]:
        """Update the numbers by the sum of gradients since the last step, and forget these.

        Returns the norm before clipping. Raises ValueError where there are none.
        """
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            raise ValueError(
                "no gradient has been added since the last optim_step: call forward_backward first"
            )
        norm = self._numbers.norm(gradient)
        if 0 < adam.grad_clip_norm < norm:
            gradient = gradient * (adam.grad_clip_norm / norm)
        group = self._optimizer.param_groups[0]
        group["lr"], group["betas"] = adam.learning_rate, (adam.beta1, adam.beta2)
        group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        self.weights.grad = gradient
        self._optimizer.step()
        self.weights.grad = None
        self.steps += 1
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    @property
    def count(self) -> int:
        """Numbers of the model on all ranks."""
        return self.weights.numel() if self._numbers.total is None else self._numbers.total

    def stored(self, weights_only: bool = False) -> StoredState:
        """Return all of the state, or its weights alone; may share its memory.

        Of numbers that are divided over ranks the first rank gets all, the others none.
        """
        own = {"weights": self.weights.detach()}
        moments = {} if weights_only else self._optimizer.state.get(self.weights, {})
        if self.gradient is not None and not weights_only:
            own["gradient"] = self.gradient
        own |= {name: moments[name] for name in MOMENTS if name in moments}
        tensors = {name: self._numbers.whole(one) for name, one in own.items()}
        if "step" in moments:
            tensors["step"] = moments["step"]
        return StoredState(self.spec, self.position, self.steps, tensors)

    @torch.no_grad()
    def restore(self, stored: StoredState, optimizer: bool) -> None:
        """Take a stored state's numbers, with the moments of AdamW or none; not its position."""
        self.weights.copy_(self._numbers.own(stored.tensors["weights"]))
        self.gradient, self.steps = None, 0
        self._optimizer.state.clear()
        if optimizer:
            self.steps = stored.steps
            moments = {n: self._own(stored.tensors[n]) for n in MOMENTS if n in stored.tensors}
            if moments:
                moments["step"] = stored.tensors["step"].clone()
                self._optimizer.state[self.weights] = moments

    def resume(self, stored: StoredState) -> None:
        """Take all of a stored state, the gradients since the last step and the position too."""
        self.restore(stored, optimizer=True)
        gradient = stored.tensors.get("gradient")
        self.gradient = None if gradient is None else self._own(gradient)
        self.position = stored.position

    def _own(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's of all numbers."""
        return self._numbers.own(whole).to(self.weights.device, copy=True)


def write_state(path: Path, stored: StoredState) -> int:
    """Write a state's file, which is on disk on return; return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"spec": asdict(stored.spec), "position": stored.position, "steps": stored.steps}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        tensors = {name: one.contiguous() for name, one in stored.tensors.items()}
        save_file(tensors, draft, {"format": FORMAT, "about": json.dumps(about)})
        to_disk(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    to_disk(path.parent)
    return path.stat().st_size


def read_state(path: Path) -> StoredState:
    """Read a state's file; raises `UnusableState`."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UnusableState(str(path), "it is of another kind or version")
            about: dict[str, Any] = json.loads(metadata["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UnusableState(str(path), f"{type(error).__name__}: {error}") from None
    spec = ModelSpec(**about["spec"])
    return StoredState(spec, int(about["position"]), int(about["steps"]), tensors)
