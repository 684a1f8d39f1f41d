"""Two islands as jobs of a cloud, with a shell script in place of Python."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from composer_mesh.configs.load import load_config
from composer_mesh.plugins.islands.jobs.jobs import JobCloud, JobExecutor, JobOptions
from composer_mesh.plugins.islands.jobs.ports import Executor, IslandReplica, IslandState
from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.services.directory.status import STATUS_FILE, RunStatus, write_status

PRESET = Path(__file__).parents[4] / "configs" / "quickstart.toml"
FINISHED = """for last; do :; done
records={folder}/store/records/${{last##*-}}
mkdir -p $records && cp {folder}/finished/status.json $records/
"""
"""A script that leaves the record of a run that has finished."""


def job_islands(
    cloud: JobCloud,
    folder: Path,
    options: JobOptions,
    secrets: Mapping[str, str],
    script: str,
    resume: bool = False,
) -> tuple[JobExecutor, list[IslandReplica]]:
    """Return a connected executor, and its islands; {folder} in the script is that of the test."""
    finished = folder / "finished"
    finished.mkdir(exist_ok=True)
    write_status(finished, RunStatus(1, None, "finished", 3, 3, 3, "shm"))
    assert (finished / STATUS_FILE).is_file()
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script.format(folder=folder)}\n")
    program.chmod(0o755)
    root = folder / "all"
    root.mkdir(exist_ok=True)
    replicas = [
        IslandReplica(
            rank,
            load_config(PRESET, [f"cluster.python={program}", f"run.name=island-{rank}"]),
            root / f"island-{rank}",
            resume,
        )
        for rank in range(2)
    ]
    executor = JobExecutor(cloud, root, options, secrets)
    executor.connect(open_store(f"file://{folder}/store"))
    return executor, replicas


def ends_of(executor: Executor, deadline_s: float = 60.0) -> list[IslandState]:
    """Return the last state of each island, once all have ended."""
    end = time.monotonic() + deadline_s
    while any(not one.ended for one in executor.poll()):
        assert time.monotonic() < end, executor.poll()
        time.sleep(0.02)
    return executor.poll()
