"""The engine interface, as the generator actor needs it. Independent of any engine."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from composer_mesh.configs import plugins
from composer_mesh.configs.schema import Config
from composer_mesh.configs.worded import Worded
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Admitted = Callable[[], object]


class RequestTooLong(ValueError):
    """The prompt and its continuation do not fit into a row of the engine's cache."""


class DuplicateRequest(Worded, ValueError):
    """A request with the id of one that is not answered yet: its id."""

    message = "{0} is already running: abort it before it is submitted again"


class RequestAborted(Worded, RuntimeError):
    """A request that an engine had to give up: its id, and why."""

    failure_class: ClassVar[str] = "infrastructure"

    message = "{0} was aborted: {1}"


class DecodingDeadlineExceeded(RequestAborted):
    """A request for which its engine completed no step: its id, and the seconds of waiting."""

    message = (
        "{0} was aborted because its engine completed no step in {1:g} s after its admission: "
        "raise run.deadline_s, or lower generator.max_concurrent"
    )


class LogitsNotFinite(RequestAborted):
    """A request whose logits were NaN or infinite, alone in its batch: its id, and the version."""

    failure_class: ClassVar[str] = "code"

    message = (
        "logits are not finite at version {1}, in {0}: sample from weights that have not "
        "diverged, for example with a lower learning rate"
    )


ResultCallback = Callable[[GenerationResult | RequestAborted], None]
"""Gets the result of a request, or the error by which the engine had to give it up."""


@dataclass(slots=True)
class PromptTokens:
    """Counts of prompt tokens since an engine's start.

    `prompt` sums the lengths of admitted prompts; for `cached` of those tokens keys were reused.
    `computed` counts tokens run through the model for prompts, and again after a weight update.
    """

    prompt: int = 0
    cached: int = 0
    computed: int = 0

    def admit(self, prompt: int, cached: int) -> None:
        """Count a prompt, the rest of which is computed."""
        self.prompt += prompt
        self.cached += cached
        self.computed += prompt - cached


class VersionedWeights(Protocol):
    """One complete version of the weights; valid until `swap` returns."""

    @property
    def version(self) -> int: ...

    def apply(self, model: Any, rate: float = 1.0) -> None:
        """Interpolate a Hugging Face model's weights towards these, in place; `rate` 1 copies."""

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield each complete tensor with all its names in a Hugging Face state dict."""


class GenerationEngine(Protocol):
    """An engine stepped by its caller; one thread at a time calls `step` and `swap`.

    `submit`, `abort` and `drop_prefixes` are thread-safe, also during a step.
    """

    version: int
    prompt_tokens: PromptTokens

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""

    @property
    def outstanding(self) -> int:
        """Number of requests that are neither answered nor aborted."""

    @property
    def decoding(self) -> int:
        """Number of requests that are admitted; the other outstanding ones wait."""

    def submit(
        self, request: GenerationRequest, done: ResultCallback, admitted: Admitted | None = None
    ) -> None:
        """Queue a request; `admitted`, then `done` are called from within later steps.

        `done` gets `LogitsNotFinite` where nothing can be sampled. Raises ValueError for a request
        that can never be served, `DuplicateRequest` for an id that is neither answered nor aborted.
        """

    def abort(self, request_id: str) -> None:
        """Give a request up: its `done` is never called, and the next step frees its slot.

        Does nothing if the id is unknown or answered.
        """

    def drop_prefixes(self) -> None:
        """Forget the prefixes kept for later prompts, before anything submitted later is admitted.

        What then is submitted together on an idle engine is answered bit by bit the same each time.
        """

    def step(self) -> int:
        """Decode; return the number of tokens sampled.

        An engine may count tokens only when their request is answered. Raises the error that ends
        the engine.
        """

    def swap(self, weights: VersionedWeights) -> None:
        """Serve other weights from the next step on; running requests continue."""

    def sleep(self, replaced: Collection[str]) -> None:
        """Free the device's memory until `wake`; running requests wait. Nothing steps meanwhile.

        `wake` will bring the weights with the `replaced` names anew.
        """

    def wake(self, weights: VersionedWeights | None) -> None:
        """Serve again, with these weights if given; running requests continue."""

    def close(self) -> None:
        """Free memory and processes."""


class ExpertsUnknown(Worded, ValueError):
    """A request for the experts of a model in which they are not read: its id."""

    message = (
        "{0} requests the experts of its tokens, which this engine does not report: serve a "
        "mixture with trainer.moe.router_replay, or leave experts_from out"
    )


def refuse_unknown_experts(request: GenerationRequest, known: bool) -> None:
    """Raise `ExpertsUnknown` for a request of experts, unless the engine's are `known`.

    Raises ValueError where it asks for them from a position on that the prompt does not have.
    """
    start, prompt = request.experts_from, len(request.prompt_ids)
    if start is None:
        return
    if not known:
        raise ExpertsUnknown(request.request_id)
    if not 0 <= start < prompt:
        raise ValueError(
            f"{request.request_id} requests experts from position {start} on, but its prompt has "
            f"{prompt} tokens: set experts_from from 0 to {prompt - 1}"
        )


def refuse_too_long(request: GenerationRequest, length: int) -> None:
    """Raise `RequestTooLong` for a request that needs more than `length` tokens in all."""
    need = len(request.prompt_ids) + request.max_new_tokens
    if need > length:
        raise RequestTooLong(
            f"{request.request_id} needs {len(request.prompt_ids)} prompt and "
            f"{request.max_new_tokens} new tokens but a row holds {length}: raise "
            "policy.max_context or lower generator.max_new_tokens"
        )


def make_engine(config: Config, folder: Path) -> GenerationEngine:
    """Return the configured engine, serving the model of `folder` as version 0. Takes seconds.

    Each engine is imported only where it is chosen.
    """
    engine: GenerationEngine = plugins.load("engines", config.generator.engine)(config, folder)
    if config.placement.colocate and not hasattr(engine, "sleep"):
        raise ValueError(
            f"placement.colocate is true but generator.engine is {config.generator.engine!r}, "
            "which has no methods sleep and wake: add them, take another engine, or set "
            "placement.colocate to false"
        )
    return engine
