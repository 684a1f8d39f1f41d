"""What every engine can do, as the generator actor needs it. No engine lives here."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Done = Callable[[GenerationResult], None]


class RequestTooLong(ValueError):
    """The prompt and its continuation do not fit into a row of the engine's cache."""


class Weights(Protocol):
    """One version of the weights, arrived whole; good until `swap` returns."""

    @property
    def version(self) -> int: ...

    def apply(self, model: Any, rate: float = 1.0) -> None:
        """Move a Hugging Face model's weights to these, in place."""

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Each whole tensor with all the names that it has in a Hugging Face state dict."""


class Engine(Protocol):
    """An engine that is stepped from outside; one thread at a time calls `step` and `swap`."""

    version: int

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""

    @property
    def outstanding(self) -> int:
        """Requests that are not answered."""

    def submit(self, request: GenerationRequest, done: Done) -> None:
        """Queue a request; `done` is called from within a later `step`.

        Any thread may call it, also while another one steps. Raises ValueError for a request that
        can never be served.
        """

    def step(self) -> int:
        """Decode; returns the number of tokens that were sampled.

        Tokens may count only once their request is answered. Raises whatever ends the engine.
        """

    def swap(self, weights: Weights) -> None:
        """Serve other weights from the next step on; requests under way go on."""

    def close(self) -> None:
        """Give memory and processes back."""


def refuse_too_long(request: GenerationRequest, length: int) -> None:
    """Raise `RequestTooLong` for a request that needs more than `length` tokens in all."""
    need = len(request.prompt_ids) + request.max_new_tokens
    if need > length:
        raise RequestTooLong(
            f"{request.request_id} needs {len(request.prompt_ids)} prompt and "
            f"{request.max_new_tokens} new tokens but a row holds {length}: raise "
            "policy.max_context or lower generator.max_new_tokens"
        )
