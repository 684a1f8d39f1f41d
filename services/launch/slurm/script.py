"""The scripts of a run's batch job and of commands that run inside of it.

    job_script(order) -> sbatch's input         reach_script(handle) -> bash

Each has a head, which only sets variables and quotes every value, and a constant body (`bodies`).
Pure: writes and queries nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from composer_mesh.configs.cluster import SlurmConfig
from composer_mesh.mesh.hosts.roster import ROSTER
from composer_mesh.services.launch.orders import authority_of, controller_command, worker_command
from composer_mesh.services.launch.ports import Handle, LaunchRefused, Order
from composer_mesh.services.launch.slurm.bodies import JOB, REACH
from composer_mesh.services.launch.slurm.places import Places
from composer_mesh.services.launch.slurm.request import options_of

MARGIN_S = 15
"""Part of `grace_s` that is reserved for ending the workers and requeueing."""


def job_script(order: Order) -> str:
    """Return the batch job of a run; raises `LaunchRefused`."""
    slurm, places = order.config.cluster.slurm, Places(order.output)
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
        _set("JOB_FILE", Places(handle.run).job),
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
                f"cluster.slurm.setup has {line!r}, which is no line of shell: write it as one of "
                "cluster.slurm.options"
            )
    return list(slurm.setup)


def _set(name: str, value: object) -> str:
    return f"{name}={shlex.quote(str(value))}"


def _list(name: str, values: Iterable[str]) -> str:
    return f"{name}=({shlex.join(values)})"
