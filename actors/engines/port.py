"""The engine interface, as the generator actor needs it. Independent of any engine."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Done = Callable[[GenerationResult], None]


class RequestTooLong(ValueError):
    """The prompt and its continuation do not fit into a row of the engine's cache."""


class Weights(Protocol):
    """One complete version of the weights; valid until `swap` returns."""

    @property
    def version(self) -> int: ...

    def apply(self, model: Any, rate: float = 1.0) -> None:
        """Interpolate a Hugging Face model's weights towards these, in place; `rate` 1 copies."""

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield each complete tensor with all its names in a Hugging Face state dict."""


class Engine(Protocol):
    """An engine stepped by its caller; one thread at a time calls `step` and `swap`."""

    version: int

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""

    @property
    def outstanding(self) -> int:
        """Number of unanswered requests."""

    def submit(self, request: GenerationRequest, done: Done) -> None:
        """Queue a request; `done` is called from within a later `step`.

        Thread-safe, also during a step. Raises ValueError for a request that can never be served.
        """

    def step(self) -> int:
        """Decode; return the number of tokens sampled.

        An engine may count tokens only when their request is answered. Raises the error that ends
        the engine.
        """

    def swap(self, weights: Weights) -> None:
        """Serve other weights from the next step on; running requests continue."""

    def close(self) -> None:
        """Free memory and processes."""


def refuse_too_long(request: GenerationRequest, length: int) -> None:
    """Raise `RequestTooLong` for a request that needs more than `length` tokens in all."""
    need = len(request.prompt_ids) + request.max_new_tokens
    if need > length:
        raise RequestTooLong(
            f"{request.request_id} needs {len(request.prompt_ids)} prompt and "
            f"{request.max_new_tokens} new tokens but a row holds {length}: raise "
            "policy.max_context or lower generator.max_new_tokens"
        )
