"""Config keys and tables that were renamed, and what they are called now.

Paths are written as in TOML without list positions: `replay.teachers.name`. A renamed table
covers every key below it. An old key is refused with the new name; it is never read.
"""

from collections.abc import Mapping, Sequence

RETIRED_KEYS: Mapping[str, str] = {
    "agreement": "logprob_mismatch",
    "data.kind": "data.task",
    "grpo": "loss",
    "grpo.advantage": "advantage.scale",
    "grpo.clip_high": "loss.clip_high",
    "grpo.clip_low": "loss.clip_low",
    "sdpo.signal": "sdpo.teacher_output",
    "sdpo.teacher_rate": "sdpo.ema_rate",
    "sdpo.wrapper": "sdpo.objective",
}
"""Old path -> new path."""


def new_name(
    path: Sequence[str | int], retired: Mapping[str, str] = RETIRED_KEYS
) -> tuple[str, str] | None:
    """The retired part of a key path and its new name; None where nothing of it was renamed."""
    names = [part for part in path if isinstance(part, str)]
    for end in range(len(names), 0, -1):
        old = ".".join(names[:end])
        if old in retired:
            return old, retired[old]
    return None
