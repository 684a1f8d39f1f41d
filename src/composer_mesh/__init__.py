"""Composer Mesh: a training service for agentic language models on Monarch.

The public names are imported when they are first used, so that reading a config never loads torch
or Monarch. Everything else is in the sub-packages and may change.
"""

import importlib
import os
from typing import Any

# Monarch opens its log when it is imported, at a path that others could predict (mesh.monarch_log).
os.environ.setdefault("MONARCH_LOG_SUFFIX", os.urandom(16).hex())

# Losses and advantages of the user's own (docs/losses.md).
_LOSSES = {
    "AdvantageInputs": "composer_mesh.losses.custom_types",
    "AdvantageOutputs": "composer_mesh.losses.custom_types",
    "LossInputs": "composer_mesh.losses.custom_types",
    "LossOutputs": "composer_mesh.losses.custom_types",
    "loss_needs": "composer_mesh.losses.custom_types",
}

# The trainer's backend (docs/trainer.md).
_TRAINER = {
    "BackendContext": "composer_mesh.actors.models.backend",
    "TorchBackend": "composer_mesh.actors.models.backend",
    "TrainerBackend": "composer_mesh.actors.models.backend",
}

_PUBLIC = {**_LOSSES, **_TRAINER}
"""Module of each public name."""

__all__ = sorted(_PUBLIC)  # noqa: PLE0605  a list of names


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
