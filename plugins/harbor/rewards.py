"""What a test script reports: reward.json and reward.txt, read as strictly as Harbor does.

`reward.json` wins over `reward.txt`. The exit code of test.sh says nothing. No file, an empty one
and anything but finite numbers is a fault and no reward: `VerifierFault`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal

JSON, TEXT = "reward.json", "reward.txt"
LONGEST_SHOWN = 80
KEY = "reward"
FaultKind = Literal[
    "verifier_timeout",  # test.sh did not end in time
    "verifier_killed",  # test.sh was ended by a signal, or by its limit of memory
    "no_reward",  # it wrote no file
    "empty_reward",  # it wrote an empty one
    "bad_reward",  # what it wrote are no finite numbers
    "no_reward_key",  # it reports several numbers, and not the one that trains
]


class VerifierFault(Exception):
    """Tests gave no reward; `kind` is for machines, `detail` for people."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


def read_rewards(files: Mapping[str, bytes]) -> dict[str, float]:
    """Return the rewards by key from the files of /logs/verifier; raise VerifierFault.

    >>> read_rewards({"reward.txt": b"0.5"})
    {'reward': 0.5}
    """
    name = JSON if JSON in files else TEXT
    content = files.get(name)
    if content is None:
        raise VerifierFault("no_reward", f"tests wrote neither {JSON} nor {TEXT}")
    if not content.strip():
        raise VerifierFault("empty_reward", f"{name} is empty")
    try:
        text = content.decode()
        found = json.loads(text) if name == JSON else {KEY: float(text)}
    except (ValueError, RecursionError):
        raise VerifierFault("bad_reward", f"{name} is {_shown(content)}") from None
    if not isinstance(found, dict):
        raise VerifierFault("bad_reward", f"{name} is {_shown(content)}, and no object of numbers")
    return {key: _number(name, key, value) for key, value in found.items()}


def reward_of(rewards: Mapping[str, float], key: str) -> float:
    """Return the reward that trains; raise VerifierFault where it is not among them.

    A single number is it under any name; of several, the one of this key.
    """
    if key in rewards:
        return rewards[key]
    if key == KEY and len(rewards) == 1:
        return next(iter(rewards.values()))
    listed = ", ".join(sorted(rewards)[:10]) or "no key"
    raise VerifierFault(
        "no_reward_key",
        f"tests report {listed}, and not {key!r}: set data.options.reward_key to one of them",
    )


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key over the steps; a missing key counts as 0."""
    keys = {key for rewards in steps for key in rewards}
    return {key: sum(one.get(key, 0.0) for one in steps) / len(steps) for key in sorted(keys)}


def reaches(rewards: Mapping[str, float], thresholds: Mapping[str, float]) -> bool:
    """Whether a step's rewards allow the next one; a missing key does not."""
    return all(rewards.get(key, -math.inf) >= least for key, least in thresholds.items())


def _number(name: str, key: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        shown = repr(value)[:LONGEST_SHOWN]
        raise VerifierFault("bad_reward", f"{name} has {shown} for {key[:LONGEST_SHOWN]!r}")
    return number


def _shown(content: bytes) -> str:
    return repr(content[:LONGEST_SHOWN])[1:]
