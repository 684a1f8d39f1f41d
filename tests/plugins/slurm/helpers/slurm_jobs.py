"""Orders for Slurm, and the batch job of a run with a fake Slurm and a fake composer-mesh."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import DEADLINE_S, FakeMesh, FakeSlurm

from composer_mesh.configs.schema import Config
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.plugins.slurm.launcher import SlurmLauncher
from composer_mesh.plugins.slurm.script import JobFiles
from composer_mesh.services.launch.ports import Handle, Order
from composer_mesh.services.launch.workers import write_files

HOST = {"name": "gpu", "count": 2, "cores": 8, "memory_gb": 64.0}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    fake = FakeSlurm(tmp_path / "slurm's bin")
    yield fake
    fake.close()


@pytest.fixture
def mesh(tmp_path: Path) -> FakeMesh:
    return FakeMesh(tmp_path / "the mesh")


class Job:
    """The files of a job, and its script when it runs."""

    def __init__(
        self, places: JobFiles, slurm: FakeSlurm, mesh: FakeMesh, reach: tuple[str, ...]
    ) -> None:
        self.places, self.slurm, self.mesh, self.reach = places, slurm, mesh, reach

    def start(self, **env: str) -> subprocess.Popen[str]:
        """Start the script; returns when its controller and workers are there."""
        process = self.slurm.start(self.places.script, **env)
        for name in ("controller", "worker-gpu-0", "worker-gpu-1"):
            self.mesh.until(name)
        return process

    def steps(self, count: int) -> None:
        (self.places.run / "metrics.jsonl").write_text("{}\n" * count)

    @property
    def requeues(self) -> list[str]:
        return self.slurm.calls("scontrol requeue")


@pytest.fixture
def job(
    tmp_path: Path, build_config: Callable[..., Config], slurm: FakeSlurm, mesh: FakeMesh
) -> Callable[..., Job]:
    """A job of two nodes; keywords are its settings."""

    def written(**settings: object) -> Job:
        config = build_config(
            cluster={"kind": "slurm", "slurm": settings}, placement={"hosts": [HOST]}
        )
        run = tmp_path / "a run's $HOME %j"
        hosts = tuple(described_hosts(config.placement))
        order = Order(config, hosts, run, tmp_path, str(mesh.python))
        write_files(SlurmLauncher().plan(order))
        setup = config.cluster.slurm.setup
        handle = Handle("slurm", run, "17", order.python, tmp_path, setup=setup)
        return Job(JobFiles(run), slurm, mesh, SlurmLauncher().reach(handle))

    return written


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The status of a script, and what it has printed."""
    printed, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, printed


def said(process: subprocess.Popen[str], words: str) -> None:
    """Wait until a script prints words."""
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"ended without '{words}'"


Build = Callable[..., Order]


@pytest.fixture
def build(tmp_path: Path, build_config: Callable[..., Config]) -> Build:
    """An order; keywords are settings of the job, `host` more of each host."""

    def order(host: dict[str, Any] | None = None, **settings: Any) -> Order:
        config = build_config(
            cluster={"kind": "slurm", "slurm": settings},
            placement={"hosts": [HOST | (host or {})]},
        )
        hosts = tuple(described_hosts(config.placement))
        return Order(config, hosts, tmp_path / "run", tmp_path, "/opt/python")

    return order
