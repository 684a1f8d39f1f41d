"""Config changes that are allowed when a run is resumed, and the reasons to refuse others.

A key is safe if no trained step depends on it: process placement, timeouts, spending limits,
measurement and checkpointing. All other keys are unsafe, so a key that is not listed is refused.

Flattens nested tables to keys with dots, to compare configs and to show them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from composer_mesh.configs.errors import shown
from composer_mesh.configs.schema import Config

PLACES = "where and how fast it runs, not what is learned"
NUMERICS = "the same sums in another order: last digits differ from here on"
PATIENCE = "how long it waits, and how often it retries"
MONEY = "applies to the total spending, from here on"
MEASURED = "what is measured and kept, not what is learned"

SAFE = (
    ("run.deadline_s", PATIENCE),
    ("run.telemetry", MEASURED),
    *((f"run.{key}", PLACES) for key in ("import_paths", "group_readable")),
    ("environment.replicas", PLACES),
    ("environment.hang_s", PATIENCE),
    *((f"environment.mcp.*.{key}", PATIENCE) for key in ("start_s", "call_s")),
    *((f"environment.mcp.*.{key}", PLACES) for key in ("processes", "token_env")),
    ("policy.cache_dir", PLACES),
    *((f"generator.{key}", PLACES) for key in ("replicas", "max_concurrent", "threads")),
    *((f"generator.{key}", NUMERICS) for key in ("engine", "dtype", "prefix_tokens", "vllm.*")),
    *((f"trainer.{key}", NUMERICS) for key in ("ranks", "threads", "sharding", "attention")),
    *(
        (f"trainer.{key}", NUMERICS)
        for key in (
            "microbatch_tokens",
            "packing",
            "prefix_sharing",
            "compile",
            "update_share_every",
            "*_parallel",
        )
    ),
    ("trainer.activation_checkpointing", NUMERICS),
    ("trainer.optimizer_offload", PLACES),
    ("trainer.checkpoint*", MEASURED),
    ("weights.*", PLACES),
    ("logprob_mismatch.all_tokens", NUMERICS),
    ("logprob_mismatch.*", MEASURED),
    *((f"sdpo.{key}", PLACES) for key in ("replicas", "threads")),
    ("sdpo.when_lost", PATIENCE),
    *((f"sdpo.hints.llm.{key}", PATIENCE) for key in ("timeout_s", "max_concurrent")),
    *((f"sdpo.hints.llm.{key}", MONEY) for key in ("budget_*", "assumed_usd")),
    *((f"sdpo.hints.llm.{key}", PLACES) for key in ("cache", "api_key_*")),
    *((f"replay.{key}", PLACES) for key in ("actors", "cache")),
    *((f"replay.{key}", PATIENCE) for key in ("*timeout_s", "attempts", "breaker.*")),
    *((f"replay.budget.{key}", MONEY) for key in ("usd", "usd_per_day", "assumed_usd")),
    ("replay.budget.unknown_prices", MONEY),
    *((f"replay.teachers.*.{key}", PATIENCE) for key in ("concurrency", "requests_per_minute")),
    *((f"replay.teachers.*.{key}", MONEY) for key in ("*_usd*", "usd_per_request", "max_usd")),
    ("replay.teachers.*.api_key_*", PLACES),
    *((f"judges.{key}", PLACES) for key in ("actors", "cache", "models.*.api_key_*")),
    *((f"judges.{key}", PATIENCE) for key in ("*timeout_s", "attempts", "answers", "breaker.*")),
    *((f"judges.{key}", PATIENCE) for key in ("models.*.concurrency", "*.requests_per_minute")),
    *((f"judges.{key}", MONEY) for key in ("when_spent", "budget.usd", "budget.usd_per_day")),
    *((f"judges.{key}", MONEY) for key in ("budget.assumed_usd", "budget.unknown_prices")),
    *((f"judges.models.*.{key}", MONEY) for key in ("*_usd*", "usd_per_request", "max_usd")),
    ("late_rewards.max_age", "rewards are taken, or not, from here on"),
    ("cluster.*", PLACES),
    ("placement.*", PLACES),
    ("supervision.*", PATIENCE),
    *((f"islands.{key}", PATIENCE) for key in ("quorum", "deadline_s", "request_s")),
    *((f"islands.{key}", PLACES) for key in ("rounds_kept", "lighthouse", "host")),
    ("eval.*", MEASURED),
    ("tracking*", MEASURED),
)
"""Patterns of safe keys; list indices are numbers."""

UNSAFE = (
    ("run.name", "the teachers' ledger identifies the run by it"),
    ("run.seed", "episodes and samples would be others"),
    ("data.*", "the prompts that are counted would be others"),
    (
        "environment.mcp.*.tools*",
        "the server describes other tools than in the prompts of the stored rollouts: run the "
        "version of the server with which the run began",
    ),
    ("environment.*", "rewards of stored rollouts came from the former rules"),
    ("policy.*", "the stored weights and tokens belong to the former model"),
    ("generator.*", "stored rollouts were sampled in the former way"),
    ("trainer.*", "steps since the checkpoint are trained once more, as they were"),
    ("schedule.*", "groups are counted by it"),
    ("islands.*", "the other islands continue with the former rules"),
    ("judges.budget.ledger", "what was spent is in the former file"),
    ("judges.*", "rewards of stored rollouts came from the former judges"),
    ("replay.budget.ledger", "what was spent is in the former file"),
    ("*", "steps since the checkpoint are trained once more, with the former loss and data"),
)
"""Reasons to refuse other keys; the first matching pattern applies."""

SCHEDULED = "rate, weights or target move with the length of the run, so past steps would be others"
Rule = Callable[[Config, Config], tuple[bool, str]]


@dataclass(frozen=True, slots=True)
class Change:
    """A changed key, whether a run can be resumed with the change, and the reason."""

    key: str
    before: Any
    after: Any
    safe: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.before)} -> {shown(self.after)} ({self.reason})"


def changes(before: Config, after: Config) -> list[Change]:
    """Return every key in which two configs differ, in config order."""
    found = different(before.model_dump(mode="json"), after.model_dump(mode="json"))
    return [Change(key, one, other, *_judged(key, before, after)) for key, one, other in found]


def different(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys in which two tables differ, with both values; None if missing."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = ({str(n): item for n, item in enumerate(items)} for items in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys([*one, *other]):
            below = f"{path}.{name}".strip(".")
            yield from different(one.get(name), other.get(name), below)
    elif one != other:
        yield path, one, other


def _judged(key: str, before: Config, after: Config) -> tuple[bool, str]:
    if key in RULES:
        return RULES[key](before, after)
    for pattern, reason in SAFE:
        if fnmatchcase(key, pattern):
            return True, reason
    return False, next(reason for pattern, reason in UNSAFE if fnmatchcase(key, pattern))


def _steps(before: Config, _: Config) -> tuple[bool, str]:
    moves = before.trainer.lr_schedule != "constant" or before.sdpo.objective == "taid"
    for one in before.weighted_channels.values():
        moves = moves or (one.schedule.decay != "constant" and one.schedule.by == "steps")
    return (False, SCHEDULED) if moves else (True, "the run is longer or shorter")


def _max_lag(before: Config, after: Config) -> tuple[bool, str]:
    if after.schedule.max_lag < before.schedule.max_lag:
        return False, "stored rollouts may be older than the new bound"
    if after.schedule.oldest_trained(0) != before.schedule.oldest_trained(0):
        return False, "past steps left tokens out by it, because max_token_age is not set"
    return True, "rollouts may run further ahead"


RULES: dict[str, Rule] = {
    "run.steps": _steps,
    "sft.steps": _steps,
    "schedule.max_lag": _max_lag,
}
"""Keys whose safety depends on the values."""


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables as text, by keys with dots: `trainer.lr`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
