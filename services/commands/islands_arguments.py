"""Arguments of the commands for islands: `islands`, and `island-job`, which its jobs run."""

import argparse
from pathlib import Path

from composer_mesh.services.commands.arguments import add_set
from composer_mesh.services.directory.claim import output_path


def add_islands(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `islands`."""
    parser.add_argument(
        "config",
        type=Path,
        nargs="+",
        metavar="CONFIG",
        help="a TOML file for all, or one for each",
    )
    add_set(parser)
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of islands")
    meet = parser.add_mutually_exclusive_group(required=True)
    meet.add_argument(
        "--store",
        metavar="URI",
        help="where they meet, such as file:///shared/run or s3://bucket/run",
    )
    meet.add_argument(
        "--lighthouse",
        metavar="URL",
        help="torchft_lighthouse by which islands meet that reach each other: http://HOST:PORT",
    )
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="DIR",
        help="the runs' directories are written below it; runs/NAME-islands when not given",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the islands that have not finished"
    )
    parser.add_argument("--only", type=int, metavar="RANK", help="start only this island")
    parser.add_argument(
        "--dry-run", action="store_true", help="print every file and command; change nothing"
    )
    parser.add_argument(
        "--detach", action="store_true", help="do not follow the islands until they end"
    )
    _add_jobs(parser)


def add_island_job(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `island-job`."""
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="the run directory in the job"
    )


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        choices=("launch", "hf-jobs", "modal"),
        default="launch",
        help="what starts them: the launcher of each config's cluster.kind, or jobs of a cloud",
    )
    jobs = parser.add_argument_group("jobs of a cloud")
    jobs.add_argument("--image", help="container image with composer-mesh and the config's paths")
    jobs.add_argument(
        "--hardware",
        metavar="NAME",
        help="the cloud's name for it: a100-large, or H100:2,cpu=16,memory=65536 at modal",
    )
    jobs.add_argument(
        "--secret",
        action="append",
        metavar="VARIABLE",
        help="environment variable that the jobs get as a secret, such as AWS_SECRET_ACCESS_KEY",
    )
    jobs.add_argument(
        "--volume",
        metavar="NAME",
        help="what keeps the run directories: USER/BUCKET of hf-jobs, a Volume of modal",
    )
    jobs.add_argument("--timeout-h", type=float, metavar="HOURS", help="longest time of a job")
    jobs.add_argument(
        "--namespace",
        help="user or organization of hf-jobs that pays, or environment of modal; the token's by "
        "default",
    )
