"""Command-line options of `composer-mesh traces`.

Cheap to import: the command line imports this module whichever command runs.
"""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Action = Literal["list", "show", "export"]
Format = Literal["parquet", "jsonl"]
SortKey = Literal["group", "reward", "turns", "tokens", "errors", "version"]

ACTIONS: tuple[Action, ...] = ("list", "show", "export")
FORMATS: tuple[Format, ...] = ("parquet", "jsonl")
SORT_KEYS: tuple[SortKey, ...] = ("group", "reward", "turns", "tokens", "errors", "version")
SHOWN = 50


class TracesRefused(Exception):
    """The request cannot be served; the message says why and what to do instead."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of rollouts, all of which must match; None does not filter.

    `step` counts from 1, as in `metrics.jsonl`. One matching kind of `errors` suffices.
    """

    group: int | None = None
    step: int | None = None
    split: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    failed: bool = False
    errors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        bounds = {"--min-reward": self.min_reward, "--max-reward": self.max_reward}
        for option, bound in bounds.items():
            if bound is not None and math.isnan(bound):
                raise TracesRefused(f"{option} is nan but must be a number: correct it")
        low, high = self.min_reward, self.max_reward
        if low is not None and high is not None and low > high:
            raise TracesRefused(
                f"--min-reward is {low:g} but --max-reward is {high:g}, so no rollout can fit: "
                "exchange them"
            )


@dataclass(frozen=True, slots=True)
class TracesOptions:
    """The action and its rollouts. `limit` 0 shows all of them."""

    run: Path
    action: Action = "list"
    trace: str | None = None
    filters: Filters = field(default_factory=Filters)
    sort: SortKey = "group"
    reverse: bool = False
    limit: int = SHOWN
    as_json: bool = False
    full: bool = False
    format: Format = "parquet"
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.action == "show" and self.trace is None:
            raise TracesRefused(
                "show has no rollout to show: add its trace_id, or GROUP/SAMPLE, for example "
                f"composer-mesh traces {self.run} show 12/0"
            )
        if self.action != "show" and self.trace is not None:
            raise TracesRefused(
                f"{self.action} takes no trace_id but got {self.trace!r}: write show"
            )
        if self.action == "export" and self.out is None:
            raise TracesRefused("export has no place to write to: add --output DIR")
        if self.limit < 0:
            raise TracesRefused(
                f"--limit is {self.limit} but must be 0 or more: 0 shows every rollout"
            )


def read_options(arguments: argparse.Namespace) -> TracesOptions:
    """Convert the parsed command line to options; raise `TracesRefused`."""
    filters = Filters(
        arguments.group,
        arguments.step,
        arguments.split,
        arguments.min_reward,
        arguments.max_reward,
        arguments.failed,
        tuple(arguments.error),
    )
    return TracesOptions(
        arguments.run,
        arguments.action,
        arguments.trace,
        filters,
        arguments.sort,
        arguments.reverse,
        arguments.limit,
        arguments.json,
        arguments.full,
        arguments.format,
        arguments.output,
    )
