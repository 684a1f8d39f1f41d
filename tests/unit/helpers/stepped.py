"""Engines and weights without a model: what a test scripts, and a record of what was called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines.port import Done, Weights
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

NEVER: list[int] = []


def request(
    name: str = "r", prompt: list[int] | None = None, new: int = 3, stop: list[int] = NEVER
) -> GenerationRequest:
    return GenerationRequest(name, prompt or [1, 2], new, 1.0, 7, stop)


@dataclass(frozen=True)
class Plain:
    """Weights that never travelled."""

    version: int
    named: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def apply(self, model: Any, rate: float = 1.0) -> None:
        raise NotImplementedError

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        yield from self.named.items()


class SteppedEngine:
    """Samples its version as the one token of a step; a request ends at its own length."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        """`during` is called in the middle of each step."""
        self.version = 0
        self.closed = False
        self._during = during
        self._running: list[tuple[GenerationRequest, Done, list[int]]] = []

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def outstanding(self) -> int:
        return len(self._running)

    def submit(self, asked: GenerationRequest, done: Done) -> None:
        self._running.append((asked, done, []))

    def step(self) -> int:
        self._during()
        under_way, self._running = self._running, []
        for asked, done, versions in under_way:
            versions.append(self.version)
            if len(versions) < asked.max_new_tokens:
                self._running.append((asked, done, versions))
                continue
            zeros = [0.0] * len(versions)
            done(GenerationResult(asked.request_id, versions, zeros, versions, "length"))
        return len(under_way)

    def swap(self, weights: Weights) -> None:
        self.version = weights.version

    def close(self) -> None:
        self.closed = True


class FakeLlm:
    """Steps as vLLM's LLMEngine: each request ends after the tokens that its params say."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.added: list[tuple[str, Any]] = []
        self.resets = True
        self.model_executor = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self._running: dict[str, Any] = {}
        self._version = "default"

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert name not in self._running
        self.added.append((name, prompt))
        self._running[name] = params

    def step(self) -> list[Any]:
        finished, self._running = self._running, {}
        return [
            SimpleNamespace(request_id=name, finished=True, outputs=[params])
            for name, params in finished.items()
        ]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(f"reset {reset_running_requests}")
        return self.resets

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"label {version}")


def completion(
    ids: list[int], spans: list[tuple[str, int, int]], reason: str = "length"
) -> SimpleNamespace:
    """A finished output of vLLM, with log-probs that count down from -1."""
    return SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(logprobs=[-1.0 - place for place in range(len(ids))]),
        weight_versions=[SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans],
        finish_reason=reason,
    )


def weight(value: float, *shape: int) -> Tensor:
    return torch.full(shape or (2, 2), value)
