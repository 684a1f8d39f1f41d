"""Trains a folder's model for some steps, and compares sampling with training on the way."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines import embedded
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.channels.policy import policy_sample
from composer_mesh.configs.schema import Config
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.traces import Trace, Turn

STEPS = 2
SHORT, LONG = 5, 40
NEW = 12
CONTEXT = 96
VOCABULARY = 260
EXACT = 1e-5


@dataclass(frozen=True)
class Exported:
    """Weights of a trainer in the same process."""

    version: int
    named: Mapping[str, Tensor]

    def apply(self, model: Any, rate: float = 1.0) -> None:
        model.load_state_dict(dict(self.named))

    def tensors(self) -> Any:
        raise NotImplementedError


def difference_in_training(config: Config, folder: Path) -> float:
    """Train some steps on what the embedded engine samples; return the largest difference of a
    sampled token's log-prob from the trainer's, each alone and beside a long neighbour."""
    learner, engine = Learner(config, folder, Ranks()), engine_of(folder)
    largest = 0.0
    for step in range(STEPS):
        prompts = _prompts(step)
        results = [*sampled(engine, prompts[:1]), *sampled(engine, prompts)]
        asked = [prompts[0], *prompts]
        for prompt, found in zip(asked, results, strict=True):
            largest = max(largest, *_trained_differences(learner, prompt, found, prompts[1]))
        learner.train(batch_of_results(step, asked, results), None)
        engine.swap(Exported(learner.version, learner.export()))
    return largest


def difference_from_own_logits(config: Config, folder: Path) -> float:
    """Train some steps on random tokens; return the largest difference of the trainer's log-probs
    from those of the model's own logits, alone and beside a long neighbour."""
    learner, rng = Learner(config, folder, Ranks()), random.Random(0)
    largest = 0.0
    for step in range(STEPS):
        prompts, found = _prompts(step), []
        for prompt in prompts:
            answer = [rng.randrange(3, VOCABULARY) for _ in range(NEW)]
            logprobs = own_logprobs(learner.model, [*prompt, *answer])[-NEW:]
            found.append(GenerationResult("", answer, logprobs, [step] * NEW, "length"))
            largest = max(largest, *_trained_differences(learner, prompt, found[-1], prompts[1]))
        learner.train(batch_of_results(step, prompts, found), None)
    return largest


def engine_of(folder: Path) -> embedded.EmbeddedEngine:
    return embedded.EmbeddedEngine(load_model(folder), 4, CONTEXT)


def _prompts(step: int) -> list[list[int]]:
    rng = random.Random(step)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (SHORT, LONG)]


def sampled(
    engine: embedded.EmbeddedEngine, prompts: Sequence[list[int]]
) -> list[GenerationResult]:
    results: dict[str, GenerationResult] = {}

    def keep(result: Any) -> None:
        assert isinstance(result, GenerationResult), result
        results[result.request_id] = result

    for number, prompt in enumerate(prompts):
        new = NEW * (1 + number % 2)
        engine.submit(GenerationRequest(str(number), prompt, new, 1.0, number, []), keep)
    while engine.busy:
        engine.step()
    return [results[str(number)] for number in range(len(prompts))]


@torch.no_grad()
def _trained_differences(
    learner: Learner, prompt: list[int], found: GenerationResult, neighbour: list[int]
) -> list[float]:
    ids = [*prompt, *found.token_ids]
    told = torch.tensor(found.logprobs)
    alone = _logprobs(learner.model, [ids])[-len(told) :]
    beside = _logprobs(learner.model, [ids, [*neighbour, *neighbour]])[len(prompt) - 1 :]
    return [float((told - own[: len(told)]).abs().max()) for own in (alone, beside)]


def _logprobs(model: Any, sequences: list[list[int]]) -> Tensor:
    """Log-probs of the first sequence's ids, as a microbatch of these sequences gives them."""
    language, ids = LanguageModel(model), padded(sequences)
    mask = padded([[True] * (len(one) - 1) for one in sequences])
    return language.logprobs(language.hidden(sequences), ids, mask)[0, : len(sequences[0]) - 1]


@torch.no_grad()
def own_logprobs(model: Any, ids: list[int]) -> list[float]:
    row = torch.tensor([ids])
    logits = model(input_ids=row, use_cache=False).logits
    found: list[float] = token_logprobs(logits[:, :-1], row[:, 1:], 1.0)[0].tolist()
    return found


def batch_of_results(
    step: int, prompts: Sequence[list[int]], found: Sequence[GenerationResult]
) -> StepBatch:
    samples = []
    for number, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        turn = Turn(prompt, one.token_ids, one.logprobs, one.versions, "stop")
        name = f"{step}-{number}"
        trace = Trace(name, 0, 0, "toolbox", "train", 0, [turn], [], 0.0, False, [])
        samples.append(policy_sample(trace, (-1.0) ** number))
    return StepBatch(step, samples, [], [])
