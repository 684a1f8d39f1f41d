"""The commands of islands: `islands`, and `island-job`, which its jobs run."""

import argparse
from pathlib import Path

from composer_mesh.services.commands.parser import add_set, command, output
from composer_mesh.services.commands.training import train
from composer_mesh.services.schedule.stopping import CommandSignals


def _add_islands(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        type=Path,
        nargs="+",
        metavar="CONFIG",
        help="TOML file or preset for all islands, or one for each",
    )
    add_set(parser)
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of islands")
    meet = parser.add_mutually_exclusive_group(required=True)
    meet.add_argument(
        "--store",
        metavar="URI",
        help="object store where the islands meet, such as file:///shared/run or s3://bucket/run",
    )
    meet.add_argument(
        "--lighthouse",
        metavar="URL",
        help="torchft_lighthouse where islands that reach each other meet, as http://HOST:PORT",
    )
    output("where the runs' directories are written (default: runs/NAME-islands)")(parser)
    parser.add_argument(
        "--resume", action="store_true", help="continue the islands that have not finished"
    )
    parser.add_argument("--only", type=int, metavar="RANK", help="start only this island")
    parser.add_argument(
        "--dry-run", action="store_true", help="print every file and command; change nothing"
    )
    parser.add_argument(
        "--detach", action="store_true", help="do not follow the islands until they end"
    )
    _add_jobs(parser)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        choices=("launch", "hf-jobs", "modal"),
        default="launch",
        help=(
            "how islands are started: by the launcher of each config's cluster.kind, or as "
            "cloud jobs"
        ),
    )
    jobs = parser.add_argument_group("jobs of a cloud")
    jobs.add_argument("--image", help="container image with composer-mesh and the config's paths")
    jobs.add_argument(
        "--hardware",
        metavar="NAME",
        help="hardware by the cloud's name: a100-large, or H100:2,cpu=16,memory=65536 on modal",
    )
    jobs.add_argument(
        "--secret",
        action="append",
        metavar="VARIABLE",
        help=(
            "environment variable that the jobs receive as a secret, such as AWS_SECRET_ACCESS_KEY"
        ),
    )
    jobs.add_argument(
        "--volume",
        metavar="NAME",
        help="storage of the run directories: USER/BUCKET of hf-jobs, or a Volume of modal",
    )
    jobs.add_argument("--timeout-h", type=float, metavar="HOURS", help="maximum hours of a job")
    jobs.add_argument(
        "--namespace",
        help=(
            "user or organization that pays on hf-jobs, or environment of modal (default: "
            "the token's)"
        ),
    )


@command(
    "train several runs that average their weights",
    _add_islands,
    signals=True,
    group="train",
    example="islands quickstart -n 2 --store file:///shared/run --dry-run",
)
def islands(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Start several runs that average their weights, and follow them."""
    from composer_mesh.plugins.islands.jobs.command import islands_command

    return islands_command(arguments, signals)


def _add_island_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="run directory in the job"
    )


@command(
    "train the island of a cloud's job, which `islands --on` starts",
    _add_island_job,
    signals=True,
    example="island-job --output runs/island",
    hidden=True,
)
def island_job(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Train the island of a cloud's job, or continue it, and copy its records to the store."""
    from composer_mesh.plugins.islands.jobs.jobs import train_in_job

    output: Path = arguments.output.expanduser()

    def train_file(config: Path) -> int:
        other = {"resume": False, "from_traces": None, "rollout_only": False}
        known = {"config": config, "set": [], "output": output, "auto_resume": True}
        return int(train.run(argparse.Namespace(**known, **other), signals))

    return train_in_job(output, train_file)


def tree_of(root: Path, as_json: bool, watch: bool) -> int | None:
    """Show the live meshes of a directory's islands; None if it has none."""
    from composer_mesh.plugins.islands.jobs.directory import islands_in, islands_tree

    place = islands_in(root)
    return None if place is None else islands_tree(place, as_json, watch)
