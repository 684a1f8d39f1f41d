"""Inputs and outputs of user loss and advantage functions: PRIME-RL's fields, and those on request.

Axes: T tokens of one sequence, S of them sampled (True in its mask), V vocabulary, H hidden size, P
prompts, G rollouts of one prompt. `custom` checks them when it calls the functions.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

NEEDS = ("entropies", "logits", "hidden_states")
"""Fields of `LossInputs` that a function gets only if it asks for them."""


def loss_needs(*names: str) -> Callable[[F], F]:
    """Decorate a loss function that reads these fields; `loss.needs` must then name them too.

    @loss_needs("entropies")
    def my_loss(inputs: LossInputs) -> LossOutputs: ...
    """

    def mark(function: F) -> F:
        function.needs = names  # type: ignore[attr-defined]
        return function

    return mark


@dataclass
class LossInputs:
    """One sequence as PRIME-RL passes it to a loss function; absent fields are None.

    `trainer_logprobs` is the current policy and carries the gradient, `inference_logprobs` are the
    generator's at sampling, `ref_logprobs` a frozen reference or teacher. `advantages` are per
    token; `loss_weights` scale a token's loss (None: 1 everywhere).

    The last three are the current policy's too, carry a gradient, and are there if `loss.needs`
    names them. Their rows are the predictions of the sampled tokens, `loss_mask` selects the
    same of the others. `logits` are divided by the sampling temperature, so that
    `logits.log_softmax(-1)` at the sampled ids are the `trainer_logprobs`; `entropies` are theirs
    in nats, over the whole vocabulary. `hidden_states` are the last ones, which the head reads.
    """

    trainer_logprobs: Float[Tensor, "T"]
    inference_logprobs: Float[Tensor, "T"]
    ref_logprobs: Float[Tensor, "T"] | None
    advantages: Float[Tensor, "T"]
    loss_mask: Bool[Tensor, "T"]
    loss_weights: Float[Tensor, "T"] | None = None
    entropies: Float[Tensor, "S"] | None = None
    logits: Float[Tensor, "S V"] | None = None
    hidden_states: Float[Tensor, "S H"] | None = None

    @property
    def teacher_logprobs(self) -> Float[Tensor, "T"] | None:
        """`ref_logprobs` by the name it had in PRIME-RL until mid-2026."""
        return self.ref_logprobs


@dataclass
class LossOutputs:
    """Output of a loss function: a scalar sum over its tokens, and metrics.

    A metric is a number, a scalar tensor or a 1-D tensor.
    """

    loss: Tensor
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class AdvantageInputs:
    """Rollouts by prompt: `rollouts[i][j]` is the j-th rollout of prompt i, all groups of one size.

    A rollout is a mapping with at least `reward`.
    """

    rollouts: list[list[Any]]


@dataclass
class AdvantageOutputs:
    """Output of an advantage function: one number per rollout, of shape [P, G]."""

    advantages: Tensor


STAND_INS = {
    "prime_rl.trainer.rl.loss": (LossInputs, LossOutputs),
    "prime_rl.orchestrator.advantage": (AdvantageInputs, AdvantageOutputs),
}


@contextmanager
def prime_rl_names() -> Iterator[None]:
    """Make these classes importable under PRIME-RL's module names in the block, if not installed.

    So a user's module with `from prime_rl.trainer.rl.loss import LossOutputs` loads unchanged. An
    installed PRIME-RL is never shadowed, and the names are removed afterwards.
    """
    if "prime_rl" in sys.modules or importlib.util.find_spec("prime_rl"):
        yield
        return
    modules = dict[str, ModuleType]()
    for path, classes in STAND_INS.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            modules.setdefault(name, ModuleType(name))
        vars(modules[path]).update({each.__name__: each for each in classes})
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
