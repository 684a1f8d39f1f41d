"""The reference actor: scores preference pairs with the frozen initial policy.

It runs concurrently with the trainer and scores each pair once. It never pulls weights.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.actors.learning.replay_channel import answer_logprobs, answer_logprobs_by_sides
from composer_mesh.actors.models.device_memory import ASLEEP, DeviceMemory, DeviceTurn
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import converted, load_model
from composer_mesh.actors.models.sharding import stored_weights
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.device import own_device
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.step_plan import pair_groups, pair_tokens

Scores = tuple[float, float]
"""Summed log-probs in nats of the chosen and of the rejected answer."""


class ReferenceActor(MeshActor):
    """One per run, only if the preference loss has a reference.

    controller -- PairSamples --> ReferenceActor -- log-probs --> controller
    """

    kind: ClassVar[str] = "reference"

    def __init__(self) -> None:
        self._device = DeviceTurn()
        self._make: Callable[[], LanguageModel] | None = None
        self._model: LanguageModel | None = None
        self._scored = 0

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path, awake: bool = True) -> None:
        """Load the frozen initial policy, unless it is not `awake`: `set_awake` does it then."""
        self._make = partial(_reference, config, folder)
        self._budget, self._ld_alpha = config.trainer.microbatch_tokens, config.replay.ld_alpha
        self._device, self._memory = DeviceTurn(awake), DeviceMemory(own_device())
        if awake:
            self._model = await asyncio.to_thread(self._make)

    @concurrent_endpoint
    async def set_awake(self, awake: bool) -> None:
        """Give the device up to others, or take it back; what is requested in between waits."""
        await self._device.set_awake(awake, self._take if awake else self._give)
        self.activity = "idle" if awake else ASLEEP

    def _take(self) -> None:
        self._memory.restore()
        if self._model is None and self._make is not None:
            self._model = self._make()

    def _give(self) -> None:
        if self._model is not None:
            self._memory.release((), constant=stored_weights(self._model.model).values())

    @concurrent_endpoint
    async def score(self, pairs: list[PairSample]) -> list[Scores]:
        """Return the scores of some pairs, in order. Calls are processed one at a time."""
        if self._make is None:
            raise RuntimeError("no policy is loaded: call load first")
        async with self._device:
            assert self._model is not None
            self.activity = f"scoring {len(pairs)} pairs"
            scores = await asyncio.to_thread(
                score_pairs, self._model, pairs, self._budget, self._ld_alpha
            )
            self._scored += len(pairs)
            self.activity = "idle"
        return scores

    def details(self) -> dict[str, int]:
        return {"scored": self._scored}


def _reference(config: Config, folder: Path) -> LanguageModel:
    dtype = getattr(torch, config.trainer.frozen_dtype)
    frozen = converted(load_model(folder), dtype).requires_grad_(False).to(own_device())
    return LanguageModel(frozen, sharing="levels" if config.trainer.prefix_sharing else "off")


@torch.no_grad()
def score_pairs(
    model: LanguageModel, pairs: Sequence[PairSample], budget: int, ld_alpha: float | None = None
) -> list[Scores]:
    """Return the model's scores of some pairs, in batches of at most `budget` padded tokens.

    The sides of a pair that exceeds it are computed one after the other.
    """
    places = range(len(pairs))
    fitting = [place for place in places if pair_tokens(pairs[place]) <= budget]
    scores: dict[int, Scores] = {}
    for group in pair_groups(pairs, fitting, budget):
        chosen, rejected = answer_logprobs(model, [pairs[place] for place in group], ld_alpha)
        scores.update(zip(group, _listed(chosen, rejected), strict=True))
        made_progress(f"{len(scores)} of {len(pairs)} pairs")
    for place in set(places) - set(fitting):
        sides = answer_logprobs_by_sides(model, pairs[place], ld_alpha)
        (scores[place],) = _listed(*sides)
        made_progress(f"{len(scores)} of {len(pairs)} pairs")
    return [scores[place] for place in places]


def _listed(chosen: Tensor, rejected: Tensor) -> list[Scores]:
    return list(zip(chosen.tolist(), rejected.tolist(), strict=True))
