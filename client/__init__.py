"""For clients of a training server: hints, pairs and the three-channel step by the Tinker SDK.

The names here are its public API, each imported when it is first used (docs/serve.md). They import
neither torch nor Monarch; the SDK (`pip install tinker`) only where its types are made.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_mesh.client.episodes import Sampler, hinted_turns, pairs_by_vote, rollouts_of
    from composer_mesh.client.sequences import (
        Hinted,
        Pair,
        Rollout,
        TeacherTopK,
        ThreeChannelStep,
        Turn,
        hinted,
    )
    from composer_mesh.client.step import submit, submit_public
    from composer_mesh.client.teachers import teacher_topk, with_reference
    from composer_mesh.rollouts.chat import ChatFormat
    from composer_mesh.tasks.toolbox import ToolboxTask

_MODULES = {
    "ChatFormat": "rollouts.chat",
    "Hinted": "client.sequences",
    "Pair": "client.sequences",
    "Rollout": "client.sequences",
    "Sampler": "client.episodes",
    "TeacherTopK": "client.sequences",
    "ThreeChannelStep": "client.sequences",
    "ToolboxTask": "tasks.toolbox",
    "Turn": "client.sequences",
    "hinted": "client.sequences",
    "hinted_turns": "client.episodes",
    "pairs_by_vote": "client.episodes",
    "rollouts_of": "client.episodes",
    "submit": "client.step",
    "submit_public": "client.step",
    "teacher_topk": "client.teachers",
    "with_reference": "client.teachers",
}
"""Module of each public name."""

__all__ = [
    "ChatFormat",
    "Hinted",
    "Pair",
    "Rollout",
    "Sampler",
    "TeacherTopK",
    "ThreeChannelStep",
    "ToolboxTask",
    "Turn",
    "hinted",
    "hinted_turns",
    "pairs_by_vote",
    "rollouts_of",
    "submit",
    "submit_public",
    "teacher_topk",
    "with_reference",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"composer_mesh.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
