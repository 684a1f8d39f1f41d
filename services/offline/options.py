"""Command-line options of `composer-mesh replay`.

Cheap to import: the command line imports this module whichever command runs.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

CONCURRENCY = 64


class ReplayRefused(Exception):
    """The offline replay cannot be done as requested; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay: traces, teachers and limits.

    `teachers` None uses those of the traces' run; `max_usd` None uses the config's limit; `out` may
    be None in a dry run only.
    """

    traces: Path
    out: Path | None
    teachers: str | None = None
    max_usd: float | None = None
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    limit: int | None = None
    concurrency: int = CONCURRENCY
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.max_usd is not None and not 0 <= self.max_usd < math.inf:
            raise ReplayRefused(
                f"--max-usd is {self.max_usd} but must be a plain number of dollars, 0 or more: "
                "correct it"
            )
        for option, count in (("--limit", self.limit), ("--concurrency", self.concurrency)):
            if count is not None and count < 1:
                raise ReplayRefused(
                    f"{option} is {count} but must be 1 state or more: raise it, or leave it out"
                )
        if self.out is None and not self.dry_run:
            raise ReplayRefused(
                "--output is not given but the pairs need a place: add --output pairs.jsonl, or "
                "--dry-run to see the price only"
            )
        if self.report is not None and not self.report.absolute().parent.is_dir():
            raise ReplayRefused(
                f"--report {self.report} must be a file in a folder that is there: correct it"
            )


def read_options(arguments: argparse.Namespace) -> ReplayOptions:
    """Convert the parsed command line to options; raise `ReplayRefused`."""
    return ReplayOptions(
        arguments.run,
        arguments.output,
        arguments.teachers,
        arguments.max_usd,
        tuple(arguments.set),
        arguments.dry_run,
        arguments.limit,
        arguments.concurrency,
        arguments.report,
    )
