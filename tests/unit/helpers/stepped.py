"""Engines and weights without a model: what a test scripts, and a record of what was called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines.loop import OpenRequests
from composer_mesh.actors.engines.port import (
    Admitted,
    PromptTokens,
    ResultCallback,
    VersionedWeights,
)
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

NEVER: list[int] = []


def request(
    name: str = "r",
    prompt: list[int] | None = None,
    new: int = 3,
    stop: list[int] = NEVER,
    deadline_s: float | None = None,
) -> GenerationRequest:
    return GenerationRequest(name, prompt or [1, 2], new, 1.0, 7, stop, deadline_s)


@dataclass(frozen=True)
class Plain:
    """Weights that never travelled."""

    version: int
    named: dict[tuple[str, ...], Tensor] = field(default_factory=dict)

    def apply(self, model: Any, rate: float = 1.0) -> None:
        raise NotImplementedError

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        yield from self.named.items()


@dataclass(eq=False)
class _Asked:
    request: GenerationRequest
    done: ResultCallback
    admitted: Admitted | None
    versions: list[int] = field(default_factory=list)
    aborted: bool = False


class SteppedEngine:
    """Samples its version as the one token of a step; a request ends at its own length."""

    def __init__(self, during: Callable[[], None] = lambda: None, rows: int = 100) -> None:
        """`during` is called in the middle of each step, after requests are admitted."""
        self.version = 0
        self.prompt_tokens = PromptTokens()
        self.closed = False
        self.dropped = 0
        self.slept: list[list[str]] = []
        self._during, self._rows = during, rows
        self._open: OpenRequests[_Asked] = OpenRequests()
        self._waiting: list[_Asked] = []
        self._running: list[_Asked] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def decoding(self) -> int:
        return len(self._running)

    def submit(
        self, request: GenerationRequest, done: ResultCallback, admitted: Admitted | None = None
    ) -> None:
        if not request.max_new_tokens:
            raise ValueError("nothing is asked")
        asked = _Asked(request, done, admitted)
        self._open.add(request.request_id, asked)
        self._waiting.append(asked)

    def abort(self, request_id: str) -> None:
        asked = self._open.abort(request_id)
        if asked is not None:
            asked.aborted = True

    def drop_prefixes(self) -> None:
        self.dropped += 1

    def step(self) -> int:
        self._admit()
        self._during()
        for asked in self._running:
            asked.versions.append(self.version)
        sampled = len(self._running)
        for asked in [a for a in self._running if len(a.versions) == a.request.max_new_tokens]:
            self._running.remove(asked)
            name, versions = asked.request.request_id, asked.versions
            if self._open.answer(name, asked):
                zeros = [0.0] * len(versions)
                asked.done(GenerationResult(name, versions, zeros, versions, "length"))
        return sampled

    def _admit(self) -> None:
        self._running = [asked for asked in self._running if not asked.aborted]
        while self._waiting and len(self._running) < self._rows:
            asked = self._waiting.pop(0)
            if not asked.aborted:
                self._running.append(asked)
                self.prompt_tokens.admit(len(asked.request.prompt_ids), 0)
                if asked.admitted is not None:
                    asked.admitted()

    def swap(self, weights: VersionedWeights) -> None:
        self.version = weights.version

    def sleep(self, replaced: Collection[str]) -> None:
        self.slept.append(sorted(replaced))

    def wake(self, weights: VersionedWeights | None) -> None:
        if weights is not None:
            self.swap(weights)

    def close(self) -> None:
        self.closed = True


class FakeLlm:
    """Steps as vLLM's LLMEngine: each request ends after the tokens that its params say."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.added: list[tuple[str, Any]] = []
        self.adapters: list[Any] = []
        self.resets = True
        self.cached: int | None = 0
        self.model_executor = SimpleNamespace(
            shutdown=lambda: self.calls.append("shutdown"),
            sleep=lambda level: self.calls.append(f"sleep {level}"),
            wake_up=lambda tags: self.calls.append(f"wake {' '.join(tags)}"),
        )
        self._running: dict[str, tuple[Any, int]] = {}
        self._version = "default"

    def add_request(
        self, name: str, prompt: dict[str, list[int]], params: Any, lora_request: Any = None
    ) -> str:
        assert name not in self._running
        self.adapters.append(lora_request)
        self.added.append((name, prompt))
        self._running[name] = (params, len(params.token_ids))
        return f"{name}-of-vllm"

    def abort_request(self, names: list[str]) -> None:
        self.calls.append(f"abort {' '.join(names)}")
        for name in names:
            del self._running[name]

    def step(self) -> list[Any]:
        assert self._running
        under_way, self._running = self._running, {}
        outputs = []
        for name, (params, left) in under_way.items():
            if left > 1:
                self._running[name] = (params, left - 1)
            else:
                outputs.append(self._output(name, params))
        return outputs

    def _output(self, name: str, params: Any) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=name, finished=True, outputs=[params], num_cached_tokens=self.cached
        )

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
