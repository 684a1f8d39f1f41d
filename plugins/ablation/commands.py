"""The command `ablate`: arms, seeds, what is varied, and what a point of success costs."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.configs.changes import Change
from composer_mesh.configs.paths import pinned_as
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.ablation.plan import (
    CHANNELS_OF,
    TARGET,
    Varied,
    plan_study,
    refuse_other_runs,
)
from composer_mesh.services.checks.accepting import (
    UsageError,
    accepted,
    items,
    listed,
    numbers,
)
from composer_mesh.services.commands.parser import add_set, command, output
from composer_mesh.services.commands.training import refuse_an_island, start
from composer_mesh.services.directory.claim import RUNS, claimed
from composer_mesh.services.directory.resume import pinned
from composer_mesh.services.schedule.stopping import CommandSignals


def _add_ablate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        type=Path,
        nargs="+",
        metavar="CONFIG",
        help="TOML file or preset; several are compared",
    )
    add_set(parser)
    arms = ",".join(CHANNELS_OF)
    parser.add_argument(
        "--arms",
        default=arms,
        metavar="A,B",
        help=f"arms to run, separated by commas: some of {arms} (default: all)",
    )
    parser.add_argument(
        "--seeds", default="0,1,2", metavar="S,T", help="seeds of each arm (default: 0,1,2)"
    )
    parser.add_argument(
        "--eval-every",
        type=int,
        metavar="N",
        help=(
            "steps between held-out evaluations (default: eval.every, or else a tenth of the run)"
        ),
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="compare the arms at each of these values; may be repeated, for all combinations",
    )
    parser.add_argument(
        "--difficulty",
        metavar="KEY=A,B",
        help="like --vary, with numbers; plots success by this key",
    )
    parser.add_argument(
        "--target",
        type=float,
        default=TARGET,
        metavar="SHARE",
        help=f"success rate up to which steps are counted (default: {TARGET:g})",
    )
    deviation = parser.add_mutually_exclusive_group()
    deviation.add_argument(
        "--deviation",
        type=float,
        metavar="POINTS",
        help=(
            "standard deviation of differences by seed, from which the detectable "
            "difference is computed"
        ),
    )
    deviation.add_argument(
        "--deviation-from",
        type=Path,
        metavar="DIR",
        help="earlier ablation from which to take that standard deviation",
    )
    parser.add_argument(
        "--usd-per-hour",
        type=float,
        metavar="USD",
        help="price of the machine, for dollars per point of success",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="REPORT",
        help=(
            "ablation.json of the same ablation elsewhere, whose finished runs are added "
            "here; may be repeated"
        ),
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the planned runs and the difference that they can detect; start nothing",
    )
    output(
        "where the runs are (default: runs/NAME-ablation); finished runs there are kept, half ones "
        "resumed"
    )(parser)


@command(
    "compare a run with and without its channels",
    _add_ablate,
    signals=True,
    group="train",
    example="ablate quickstart --arms none,both --seeds 0,1 --dry-run",
)
def ablate(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Accept every run of the ablation, train the unfinished ones, then print the tables."""
    study = plan_study(
        arguments.config,
        arguments.set,
        items(arguments.arms),
        numbers("--seeds", arguments.seeds),
        arguments.eval_every,
        [Varied.parse(text) for text in arguments.vary],
        Varied.parse(arguments.difficulty, "--difficulty") if arguments.difficulty else None,
        arguments.target,
    )
    for setting in study.settings:
        refuse_an_island(setting.base, "compares runs that know nothing of each other")
        if setting.base.cluster.remote:
            raise UsageError(
                f"cluster.kind is {setting.base.cluster.kind!r} but the runs of an ablation follow "
                "each other in one process, and a worker serves one run: set cluster.kind to "
                "'local'"
            )
    commits, *_ = [accepted(run.config) for run in study.runs]
    first = study.settings[0]
    folder = arguments.output or RUNS / f"{first.base.run.name}-ablation"
    refuse_other_runs(study.runs, folder)
    from composer_mesh.plugins.ablation.command import merged_runs
    from composer_mesh.plugins.ablation.report import power_before, study_lines

    merged = merged_runs(study, arguments.merge)
    power, price = power_before(arguments, len(first.seeds), folder), _price(arguments)
    if arguments.dry_run:
        for line in study_lines(study, folder, power, merged):
            print(line)
        return 0
    with claimed(folder):
        signals.hold()
        from composer_mesh.plugins.ablation.command import ablate_command

        def one(config: Config, place: Path, resumed: Sequence[Change] | None) -> int:
            """Train one run; a signal that came when it was done ends the ablation too."""
            if signals.status:
                return signals.status
            config = listed(pinned_as(pinned(config, place), commits))
            return start(config, place, signals, resumed) or signals.status

        return ablate_command(study, folder, one, power, price, merged)


def _price(arguments: argparse.Namespace) -> float | None:
    price: float | None = arguments.usd_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--usd-per-hour is {price} but must be a price of 0 or more: correct it")
    return price
