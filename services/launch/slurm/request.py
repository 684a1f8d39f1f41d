"""The sbatch options of a run's batch job, or why there can be none.

Uses only options that behave alike in Slurm 19.05 and later. Pure: queries no cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from composer_mesh.configs.cluster import SlurmConfig
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.memory import in_gb
from composer_mesh.services.launch.ports import LaunchRefused, Order
from composer_mesh.services.launch.slurm.places import Places

MIB = 2**20
EARLY_S = 60
"""Slurm may send the signal before the time limit this many seconds earlier than requested."""
LONGEST_NAME = 64
OURS = {
    **dict.fromkeys(("partition", "account", "qos", "exclusive"), "cluster.slurm"),
    **dict.fromkeys(("time", "signal"), "cluster.slurm.time_limit and grace_s"),
    "requeue": "cluster.slurm.resubmit",
    "no-requeue": "cluster.slurm.resubmit",
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "mincpus", "mem", "gres"),
        "placement.hosts",
    ),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), "placement.hosts"),
}
"""Options that the run sets itself, and the config keys that determine them."""
NEVER = {
    "array": "would start several controllers in one run directory",
    "clusters": "submits to another cluster than the one that is asked about the job",
    "wrap": "replaces the script",
    "parsable": "is given already",
    "wait": "would keep launch from returning",
    "chdir": "is the folder from which the run is launched",
    "output": "is the run's launch folder",
    "error": "is the run's launch folder",
    "open-mode": "must append, so that a job that is queued again keeps its log",
    "kill-on-invalid-dep": "has no meaning without a dependency of ours",
}
"""Options that a job of a run cannot have, and why."""


def options_of(order: Order) -> list[str]:
    """Return the sbatch options in the order of the script; raises `LaunchRefused`."""
    slurm, hosts = order.config.cluster.slurm, order.hosts
    _check_hosts(hosts)
    _check_time(slurm)
    _check_path("the run's directory", str(order.output))
    _check_path("the folder of the launch", str(order.folder))
    return [
        f"--job-name={job_name(order.config.run.name)}",
        *_named(slurm),
        f"--nodes={len(hosts)}",
        "--ntasks-per-node=1",
        *_size(slurm, hosts[0]),
        f"--time={slurm.time_limit}",
        f"--signal=B:TERM@{slurm.grace_s}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--chdir={order.folder}",
        f"--output={_pattern(str(Places(order.output).folder))}/slurm-%j.log",
        *(_further(option) for option in slurm.options),
    ]


def job_name(name: str) -> str:
    """Return a job name for a run: letters, digits, dots and dashes, never empty."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return cleaned[:LONGEST_NAME] or "composer-mesh"


def _pattern(path: str) -> str:
    """Escape a path, so that Slurm replaces nothing in it."""
    return path.replace("%", "%%")


def seconds_of(time_limit: str) -> int | None:
    """Return a time limit of sbatch in seconds; None for 0, which means unlimited."""
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    whole = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return whole or None


def _named(slurm: SlurmConfig) -> Iterator[str]:
    for name in ("partition", "account", "qos"):
        if value := getattr(slurm, name):
            if re.search(r"[\s\x00-\x1f]", value):
                raise LaunchRefused(
                    f"cluster.slurm.{name} is {value!r}, but Slurm's names have no blanks: "
                    "correct it"
                )
            yield f"--{name}={value}"


def _size(slurm: SlurmConfig, host: HostResources) -> Iterator[str]:
    """Options for each node's size; GPUs by `--gres`, which all selection plugins support."""
    if slurm.exclusive:
        yield from ("--exclusive", f"--mincpus={host.cores}", "--mem=0")
    else:
        yield from (f"--cpus-per-task={host.cores}", f"--mem={host.memory // MIB}M")
    if host.gpus:
        yield f"--gres=gpu:{host.gpus}"


def _check_hosts(hosts: Sequence[HostResources]) -> None:
    first = hosts[0]
    for other in hosts[1:]:
        if _shape(other) != _shape(first):
            raise LaunchRefused(
                f"placement.hosts has {first.name} with {_about(first)} and {other.name} with "
                f"{_about(other)}, but one batch job asks the same of every node: describe all "
                "hosts as the largest of them, or as the smallest if that has room"
            )


def _shape(host: HostResources) -> tuple[int, int, int]:
    return (host.cores, host.memory, host.gpus)


def _about(host: HostResources) -> str:
    return f"{host.cores} cores, {in_gb(host.memory)} GB and {host.gpus} GPUs"


def _check_time(slurm: SlurmConfig) -> None:
    limit, least = seconds_of(slurm.time_limit), slurm.grace_s + EARLY_S
    if limit is not None and limit <= least:
        raise LaunchRefused(
            f"cluster.slurm.time_limit is {slurm.time_limit} ({limit} s) but must be above "
            f"{least} s, for Slurm sends the signal up to {EARLY_S} s earlier than grace_s = "
            f"{slurm.grace_s}, and nothing would be left to train: raise time_limit, or lower "
            "grace_s"
        )


def _check_path(what: str, path: str) -> None:
    if "\\" in path or not path.isprintable():
        raise LaunchRefused(
            f"{what} is {path!r}, but Slurm takes neither backslashes nor control characters in "
            "a path: give it another name"
        )


def _further(option: str) -> str:
    """Return a user's option, unless the run sets it itself or could not run with it."""
    name = option.removeprefix("--").partition("=")[0]
    if not re.fullmatch(r"--[a-z][a-z-]*(=.+)?", option) or not option.isprintable():
        raise LaunchRefused(
            f"cluster.slurm.options has {option!r}, but each must be a whole option of one line "
            'such as "--constraint=h100": correct it'
        )
    if name in OURS:
        raise LaunchRefused(
            f"cluster.slurm.options has {option!r}, which {OURS[name]} decides: set that"
        )
    if name in NEVER:
        raise LaunchRefused(
            f"cluster.slurm.options has {option!r}, but --{name} {NEVER[name]}: remove it"
        )
    return option
