"""The reference actor: scores preference pairs with the frozen initial policy.

It runs concurrently with the trainer and scores each pair once. It never pulls weights.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.actors.learning.replay_channel import answer_logprobs, answer_logprobs_by_sides
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import converted, load_model
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
        self._order = asyncio.Lock()
        self._model: LanguageModel | None = None
        self._scored = 0

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the frozen initial policy."""
        model = await asyncio.to_thread(load_model, folder)
        dtype = getattr(torch, config.trainer.frozen_dtype)
        frozen = converted(model, dtype).requires_grad_(False).to(own_device())
        self._model = LanguageModel(
            frozen, sharing="levels" if config.trainer.prefix_sharing else "off"
        )
        self._budget, self._ld_alpha = config.trainer.microbatch_tokens, config.replay.ld_alpha

    @concurrent_endpoint
    async def score(self, pairs: list[PairSample]) -> list[Scores]:
        """Return the scores of some pairs, in order. Calls are processed one at a time."""
        if self._model is None:
            raise RuntimeError("no policy is loaded: call load first")
        async with self._order:
            self.activity = f"scoring {len(pairs)} pairs"
            scores = await asyncio.to_thread(
                score_pairs, self._model, pairs, self._budget, self._ld_alpha
            )
            self._scored += len(pairs)
            self.activity = "idle"
        return scores

    def details(self) -> dict[str, int]:
        return {"scored": self._scored}


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
