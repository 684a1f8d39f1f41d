"""The executors that `composer-mesh islands --on` knows, and the checks of what each needs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from composer_mesh.plugins.islands.jobs.by_launch import LaunchExecutor
from composer_mesh.plugins.islands.jobs.hf_jobs import HfJobs
from composer_mesh.plugins.islands.jobs.jobs import JobCloud, JobExecutor, JobOptions
from composer_mesh.plugins.islands.jobs.modal_sandboxes import ModalSandboxes
from composer_mesh.plugins.islands.jobs.ports import Executor
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.launch.ports import LaunchFailed

LAUNCH = "launch"
CLOUDS: Mapping[str, Callable[[str | None], JobCloud]] = {
    HfJobs.name: HfJobs,
    ModalSandboxes.name: ModalSandboxes,
}
"""The clouds by their names in `--on`; each gets the `--namespace`."""
OF_JOBS = ("image", "hardware", "secret", "volume", "timeout_h", "namespace")
"""Options that say what a job is made of."""


def executor_of(arguments: argparse.Namespace, root: Path) -> Executor:
    """Return what starts the islands of a directory; raises `UsageError` for unfit options."""
    if arguments.on == LAUNCH:
        given = [name for name in OF_JOBS if getattr(arguments, name)]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} is for jobs of a cloud, but --on is {LAUNCH}: "
                f"remove it, or add --on {' or '.join(CLOUDS)}"
            )
        return LaunchExecutor()
    if arguments.image is None:
        raise UsageError(
            f"--on is {arguments.on} but --image is missing: name an image with composer-mesh, "
            "such as registry.example/composer-mesh:0.2"
        )
    if arguments.store is None:
        raise UsageError(
            f"--on is {arguments.on} but --store is missing: what jobs record comes back through "
            "it, such as s3://bucket/run"
        )
    if arguments.store.startswith("file:"):
        raise UsageError(
            f"--store is {arguments.store!r}, but jobs of {arguments.on} see no folder of this "
            "machine: give an address such as s3://bucket/run"
        )
    if arguments.timeout_h is not None and not arguments.timeout_h > 0:
        raise UsageError(f"--timeout-h is {arguments.timeout_h:g} but must be above 0")
    options = JobOptions(
        arguments.image,
        arguments.hardware,
        tuple(arguments.secret or ()),
        arguments.volume,
        None if arguments.timeout_h is None else arguments.timeout_h * 3600,
    )
    try:
        cloud = CLOUDS[arguments.on](arguments.namespace)
        cloud.check(options)
    except LaunchFailed as failed:
        raise UsageError(f"--on is {arguments.on}, but {failed}") from failed
    return JobExecutor(cloud, root, options, _secrets(options.secrets))


def _secrets(names: tuple[str, ...]) -> Mapping[str, str]:
    for name in names:
        if not os.environ.get(name):
            raise UsageError(
                f"--secret {name} names a variable that is not set here: export it, or leave it out"
            )
    return {name: os.environ[name] for name in names}
