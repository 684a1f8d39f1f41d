"""Runs as jobs of a real Slurm that the tests start here: `nox -s slurm`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[3] / "procs" / "helpers"):
    sys.path.insert(0, str(folder))

from cluster import SlurmCluster, missing, started  # noqa: E402

ASKED_FOR = "COMPOSER_MESH_TEST_SLURM"
NODES = ("node-a", "node-b")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A cluster of two nodes, which are this machine twice."""
    if not os.environ.get(ASKED_FOR):
        pytest.skip(f"starts a Slurm on this machine: run `nox -s slurm`, or set {ASKED_FOR}=1")
    if absent := missing():
        pytest.skip(f"{', '.join(absent)} not installed: apt install slurm-wlm munge")
    with started(NODES) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _slurm_here(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every program of Slurm that a test runs talks to that cluster; no job outlives a test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    yield
    slurm.end_jobs()


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """An interpreter whose composer-mesh trains nothing."""
    script = tmp_path / "fake python"
    fake = Path(__file__).with_name("fake_mesh.py")
    script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(fake)])} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this session find the warm start that the first of them makes."""
    return tmp_path_factory.mktemp("policies")
