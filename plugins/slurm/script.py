"""The scripts of a run's batch job and of commands that run inside of it.

    job_script(order) -> sbatch's input         reach_script(handle) -> bash

Each has a head, which only sets variables and quotes every value, and a constant body (`bodies`).
Pure: writes and queries nothing.

The sbatch options of a run's batch job, or why there can be none.

Uses only options that behave alike in Slurm 19.05 and later. Pure: queries no cluster.

Paths of a launched job's files, in the folder `launch` of its run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from composer_mesh.configs.cluster import SlurmConfig
from composer_mesh.mesh.hosts.roster import ROSTER
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.memory import in_gb
from composer_mesh.plugins.slurm.bodies import JOB, REACH
from composer_mesh.services.launch.ports import Handle, LaunchRefused, Order
from composer_mesh.services.launch.workers import (
    FOLDER,
    authority_of,
    controller_command,
    log_file,
    worker_command,
)


class JobFiles:
    """Paths of the files that a run's job reads and writes; all hosts share them.

    `script` is that for sbatch, `log` has the output of the controller and messages of the job,
    `job` the id of the current or last job, and `queued_at` the step after which it was last queued
    again. `stopping` marks a run that is being stopped for good: no job resumes it. All but the log
    and the run are in `folder`.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.folder, self.log = run, run / FOLDER, log_file(run)
        self.script = self.folder / "job.sbatch"
        self.job = self.folder / "slurm-job"
        self.stopping = self.folder / "stopping"
        self.queued_at = self.folder / "queued-again-at"


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
    "clusters": "submits to another cluster than the one that is queried about the job",
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
        f"--output={_pattern(str(JobFiles(order.output).folder))}/slurm-%j.log",
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
                f"{_about(other)}, but one batch job requests the same of every node: describe all "
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
            f"{least} s, or no time would remain to train: Slurm sends the signal up to {EARLY_S} "
            f"s before grace_s = {slurm.grace_s}; raise time_limit, or lower grace_s"
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


MARGIN_S = 15
"""Part of `grace_s` that is reserved for ending the workers and requeueing."""


def job_script(order: Order) -> str:
    """Return the batch job of a run; raises `LaunchRefused`."""
    slurm, places = order.config.cluster.slurm, JobFiles(order.output)
    roster, authority = order.output / ROSTER, authority_of(order)
    worker = worker_command(order.python, order.config, roster, authority)
    directives = [f"#SBATCH {shlex.quote(option)}" for option in options_of(order)]
    head = [
        _set("RUN", order.output),
        _set("LAUNCH", places.folder),
        _list("HOSTS", (host.name for host in order.hosts)),
        _list("WORKER", worker),  # and its name, which each node knows
        _list("CONTROLLER", controller_command(order.python, order.output, "--auto-resume")),
        _set("PATIENCE_S", _patience_s(slurm)),
        _set("RESUBMIT", "yes" if slurm.resubmit else "no"),
    ]
    return "\n".join(["#!/bin/bash", *directives, *_setup(slurm), *head, JOB])


def reach_script(handle: Handle) -> str:
    """Return a script that runs its arguments as a command on the controller's node."""
    head = [
        _set("JOB_FILE", JobFiles(handle.run).job),
        _set("FOLDER", handle.folder),
        _set("SETUP", "\n".join(handle.setup)),
    ]
    return "\n".join(["#!/bin/bash", *head, REACH])


def _patience_s(slurm: SlurmConfig) -> int:
    return max(1, slurm.grace_s - MARGIN_S, slurm.grace_s // 2)


def _setup(slurm: SlurmConfig) -> list[str]:
    lines = _checked(slurm)
    return ["", "# cluster.slurm.setup", *lines, ""] if lines else [""]


def _checked(slurm: SlurmConfig) -> list[str]:
    for line in slurm.setup:
        if line.lstrip().startswith("#SBATCH"):
            raise LaunchRefused(
                f"cluster.slurm.setup has {line!r}, which is not a line of shell: write it as one "
                "of cluster.slurm.options"
            )
    return list(slurm.setup)


def _set(name: str, value: object) -> str:
    return f"{name}={shlex.quote(str(value))}"


def _list(name: str, values: Iterable[str]) -> str:
    return f"{name}=({shlex.join(values)})"
