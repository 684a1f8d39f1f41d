"""Requests for an embedded engine, what it answered, and what a plain forward says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Results = dict[str, GenerationResult]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@dataclass(frozen=True)
class Plain:
    """Weights of a version that never travelled."""

    version: int
    state: dict[str, Tensor]

    def apply(self, model: Any, rate: float = 1.0) -> None:
        assert rate == 1.0
        model.load_state_dict(self.state)

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for name, tensor in self.state.items():
            yield (name,), tensor


def ask(name: str, prompt: list[int], new: int = 8, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(name, prompt, new, 1.0, seed, [])


def put(engine: EmbeddedEngine, requests: list[GenerationRequest], results: Results) -> None:
    for one in requests:
        engine.submit(one, lambda result: results.__setitem__(result.request_id, result))


def serve(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> Results:
    results: Results = {}
    put(engine, requests, results)
    while engine.busy:
        engine.step()
    return results


def replay_outcome(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Log-probs of the tokens after the prompt, by one plain forward over everything."""
    device = next(model.parameters()).device
    ids = torch.tensor([prompt + tokens], device=device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def assert_faithful(model: Any, asked: GenerationRequest, result: GenerationResult) -> None:
    expected = replay_outcome(model, asked.prompt_ids, result.token_ids)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, **CLOSE)


@contextmanager
def computed(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward of the model."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _module, inputs, _output: counts.append(inputs[0].numel())
    )
    try:
        yield counts
    finally:
        hook.remove()
