"""For clients of a training server: hints, pairs and the three-channel step by the Tinker SDK.

The names here are its public API, each imported when it is first used (docs/serve.md). They import
neither torch nor Monarch; the SDK (`pip install tinker`) only where its types are made.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_mesh.plugins.tinker.client.episodes import (
        Sampler,
        hinted_turns,
        pairs_by_vote,
        rollouts_of,
        teacher_topk,
        with_reference,
    )
    from composer_mesh.plugins.tinker.client.sequences import (
        Hinted,
        Pair,
        Rollout,
        TeacherTopK,
        ThreeChannelStep,
        Turn,
        hinted,
    )
    from composer_mesh.plugins.tinker.client.step import submit, submit_public
    from composer_mesh.rollouts.chat import ChatFormat
    from composer_mesh.tasks.toolbox import ToolboxTask

_MODULES = {
    "ChatFormat": "rollouts.chat",
    "Hinted": "plugins.tinker.client.sequences",
    "Pair": "plugins.tinker.client.sequences",
    "Rollout": "plugins.tinker.client.sequences",
    "Sampler": "plugins.tinker.client.episodes",
    "TeacherTopK": "plugins.tinker.client.sequences",
    "ThreeChannelStep": "plugins.tinker.client.sequences",
    "ToolboxTask": "tasks.toolbox",
    "Turn": "plugins.tinker.client.sequences",
    "hinted": "plugins.tinker.client.sequences",
    "hinted_turns": "plugins.tinker.client.episodes",
    "pairs_by_vote": "plugins.tinker.client.episodes",
    "rollouts_of": "plugins.tinker.client.episodes",
    "submit": "plugins.tinker.client.step",
    "submit_public": "plugins.tinker.client.step",
    "teacher_topk": "plugins.tinker.client.episodes",
    "with_reference": "plugins.tinker.client.episodes",
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
