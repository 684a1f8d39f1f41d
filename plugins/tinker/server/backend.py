"""The ports of a training server to what computes: a trainer, and samplers."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.plugins.tinker.models.messages import (
    ModelSpec,
    ScoreRequest,
    Scores,
    TrainCall,
    TrainResult,
)
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services.pool.dispatch import NoReplicaLeft

SERVER_FAULTS = (StoreError, sqlite3.Error, NoReplicaLeft)
"""What ends the server: no log, or nothing that computes. All other errors are an operation's."""


class BackendLost(Exception):
    """What computed was lost, with all models that it held; the text says why."""


class TrainBackend(Protocol):
    """Holds models until it is lost. All methods may raise `BackendLost`."""

    async def open(self, model: str, spec: ModelSpec, path: Path | None) -> int:
        """Take a model in, from its file where it has one; return its position."""
        ...

    async def close(self, models: Sequence[str]) -> None:
        """Forget models."""
        ...

    async def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        """Execute calls on models that are open, and return their results in order."""
        ...

    async def save(self, model: str, path: Path) -> int:
        """Write a model's state to a file; return its bytes."""
        ...


class SampleBackend(Protocol):
    """Samples from files of weights, the base model for an empty path."""

    async def sample(
        self, snapshot: str, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Return continuations; raises ValueError for a request that cannot be served."""
        ...

    async def score(
        self, snapshot: str, sequences: Sequence[list[int]], request: ScoreRequest
    ) -> list[Scores]:
        """Return log-probs of given sequences."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Give requests up, which then raise."""
        ...
