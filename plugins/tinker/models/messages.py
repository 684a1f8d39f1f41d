"""What a server and its trainers and samplers tell each other about clients' models.

Independent of HTTP and of how clients write their requests.

Axes: T tokens of a sequence, K targets of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from composer_mesh.configs.worded import Worded

CallKind = Literal["forward", "forward_backward", "optim_step", "load_weights", "save"]
CHANGES = frozenset({"forward_backward", "optim_step", "load_weights"})
"""Calls that change a model: each moves its position by one."""


@dataclass(frozen=True)
class ModelSpec:
    """What of the policy a model trains: adapters of a rank, or with rank 0 all weights."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence: the ids that the model reads [T], and arrays [T] or [T, K] for the loss."""

    tokens: NDArray[np.int64]
    inputs: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class AdamParams:
    """AdamW's settings for one step; a `grad_clip_norm` of 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class BatchShape:
    """In which batch a call was computed: its place among several models', and the padded sizes.

    A call that is repeated in the same shape gives the same bits, whatever the other models do.
    """

    models: int
    place: int
    rows: int
    length: int


@dataclass(frozen=True, eq=False)
class TrainCall:
    """One operation of one model at its position, which counts the changes before it.

    `shape` asks for the batch of an earlier execution, which is repeated.
    """

    model: str
    position: int
    kind: CallKind
    data: tuple[Datum, ...] = ()
    loss: str = ""
    options: Mapping[str, float] = field(default_factory=dict)
    adam: AdamParams | None = None
    path: str = ""
    optimizer: bool = False
    shape: BatchShape | None = None


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What a call gave; one with an `error` has changed nothing."""

    logprobs: tuple[NDArray[np.float32], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    shape: BatchShape | None = None
    error: str = ""


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """What to compute of a sequence's tokens in addition to sampling.

    All of it is of the model without adapters.
    """

    top_k: int = 0
    targets: NDArray[np.int64] | None = None
    """Ids [T - 1, K] to score at positions 1 to T - 1; -1 scores nothing."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Log-probs of a sequence's own tokens 1 to T - 1, and of others at their positions."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    target_logprobs: NDArray[np.float32] | None = None


class ModelNotOpen(Worded, RuntimeError):
    """A trainer that does not hold a model at a position: it was replaced, and must be informed."""

    failure_class: ClassVar[str] = "infrastructure"

    message = "{0} is requested at position {1} but held at {2}: open it again"
