"""Arguments of `ablate`: arms, seeds, what is varied, and what a point of success costs."""

import argparse
from pathlib import Path

from composer_mesh.services.ablation.plan import CHANNELS_OF, TARGET
from composer_mesh.services.commands.arguments import add_set
from composer_mesh.services.directory.claim import output_path


def add_ablate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ablate`."""
    parser.add_argument(
        "config", type=Path, nargs="+", metavar="CONFIG", help="a TOML file; several are compared"
    )
    add_set(parser)
    arms = ",".join(CHANNELS_OF)
    parser.add_argument("--arms", default=arms, metavar="A,B", help=f"of {arms}; all by default")
    parser.add_argument(
        "--seeds", default="0,1,2", metavar="S,T", help="seeds of each arm; 0,1,2 by default"
    )
    parser.add_argument(
        "--eval-every",
        type=int,
        metavar="N",
        help="steps between held-out evaluations; eval.every, or else a tenth of the run",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="compare the arms at each of these values; repeatable, for all combinations",
    )
    parser.add_argument(
        "--difficulty", metavar="KEY=A,B", help="the same with numbers: draws success by this key"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=TARGET,
        metavar="SHARE",
        help=f"success whose steps are counted; {TARGET:g} by default",
    )
    deviation = parser.add_mutually_exclusive_group()
    deviation.add_argument(
        "--deviation",
        type=float,
        metavar="POINTS",
        help="standard deviation of differences by seed, for what the seeds can see",
    )
    deviation.add_argument(
        "--deviation-from", type=Path, metavar="DIR", help="an earlier ablation that it is taken of"
    )
    parser.add_argument(
        "--usd-per-hour", type=float, metavar="USD", help="price of the machine, for $ a point"
    )
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="REPORT",
        help="ablation.json of the same ablation elsewhere, whose finished runs count here; "
        "repeatable",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be run, and what it can see"
    )
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="DIR",
        help="where the runs are; runs/NAME-ablation when not given; finished runs there are kept, "
        "half ones resumed",
    )
