"""Whether what an engine sampled agrees, token by token, with the trainer's model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_probe import State

from composer_mesh.actors.engines.embedded_requests import truncated
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
TOLERANCE = 1e-3
"""Nats, in float32: what importance ratios near 1 can do with."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Versions:
    """A model in several versions, all of its weights or some; the first of them is in `folder`."""

    model: Any
    states: list[State]
    folder: Path

    def logprobs(self, version: int, asked: GenerationRequest, tokens: list[int]) -> torch.Tensor:
        """The trainer's log-probs of the tokens after the prompt, under a version's weights."""
        self.model.load_state_dict(self.states[version], strict=False)
        ids = torch.tensor([asked.prompt_ids + tokens])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        logits = logits[len(asked.prompt_ids) - 1 : -1] / (asked.temperature or 1.0)
        if asked.temperature:
            cut = asked.truncation
            limits = torch.tensor([cut.top_p, cut.top_k, cut.min_p], dtype=torch.float64)
            logits = truncated(logits, *limits[:, None, None].expand(3, len(logits), 1))
        values = torch.log_softmax(logits, -1)
        return values.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, ["generator.engine=vllm", *overrides])


def requests(count: int, new: int, temperatures: tuple[float, ...]) -> list[GenerationRequest]:
    """Prompts of different lengths, a third of which begin alike, with budgets up to `new`."""
    rng = random.Random(count)
    begins = [rng.randrange(250) for _ in range(64)]
    return [
        GenerationRequest(
            f"r{index}",
            begins * (index % 3 == 0) + [rng.randrange(250) for _ in range(rng.randint(1, 90))],
            rng.randint(1, new),
            temperatures[index % len(temperatures)],
            rng.randrange(1 << 40),
            [],
        )
        for index in range(count)
    ]


def assert_agreement(
    versions: Versions, asked: list[GenerationRequest], results: list[GenerationResult]
) -> None:
    """Every log-prob is that of the version which its token is labelled with."""
    found = {result.request_id: result for result in results}
    assert found.keys() == {one.request_id for one in asked}
    for one in asked:
        result = found[one.request_id]
        assert len(result.token_ids) == one.max_new_tokens
        labels = torch.tensor(result.versions)
        assert result.versions == sorted(result.versions)
        for version in set(result.versions):
            expected = versions.logprobs(version, one, result.token_ids)[labels == version]
            sampled = torch.tensor(result.logprobs)[labels == version]
            torch.testing.assert_close(sampled, expected, atol=TOLERANCE, rtol=0)


def across(results: list[GenerationResult]) -> int:
    """How many requests were served by several versions."""
    return sum(len(set(result.versions)) > 1 for result in results)
