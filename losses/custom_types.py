"""What a user's loss or advantage function is given and returns, field by field as in PRIME-RL.

Axes: T tokens of one sequence, P prompts, G rollouts of one prompt. Nothing here is checked: that
is done where the functions are called, in `custom` and `custom_advantage`.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass
class LossInputs:
    """One sequence as PRIME-RL hands it to a loss function; what is None does not exist.

    `trainer_logprobs` is the current policy and carries the gradient, `inference_logprobs` what
    the generator reported when it sampled, `ref_logprobs` a frozen reference or teacher.
    `advantages` stand on every token; `loss_weights` scale a token's loss (None: 1 everywhere).
    """

    trainer_logprobs: Float[Tensor, "T"]
    inference_logprobs: Float[Tensor, "T"]
    ref_logprobs: Float[Tensor, "T"] | None
    advantages: Float[Tensor, "T"]
    loss_mask: Bool[Tensor, "T"]
    loss_weights: Float[Tensor, "T"] | None = None

    @property
    def teacher_logprobs(self) -> Float[Tensor, "T"] | None:
        """`ref_logprobs` by the name it had in PRIME-RL until mid-2026."""
        return self.ref_logprobs


@dataclass
class LossOutputs:
    """What a loss function returns: a scalar sum over its tokens, and what to log.

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
    """What an advantage function returns: one number a rollout, of shape [P, G]."""

    advantages: Tensor


STAND_INS = {
    "prime_rl.trainer.rl.loss": (LossInputs, LossOutputs),
    "prime_rl.orchestrator.advantage": (AdvantageInputs, AdvantageOutputs),
}


@contextmanager
def prime_rl_names() -> Iterator[None]:
    """Within, these classes can be imported from where PRIME-RL has them, if it is not installed.

    So a user's module that begins with `from prime_rl.trainer.rl.loss import LossOutputs` loads as
    it is. Nothing of it stays: an installed PRIME-RL is never shadowed.
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
