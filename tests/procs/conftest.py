"""Real Monarch processes: what they inherit, and that none of them outlives its test."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# Children import the actors of the tests by name, and inherit only the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

from composer_mesh.mesh.processes import is_alive  # noqa: E402
from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402

Events = list[tuple[str, str, str]]


@pytest.fixture
def events() -> Events:
    """What the supervisor of a test has recorded."""
    return []


@pytest.fixture
async def supervisor(events: Events) -> Supervisor:
    """A supervisor that keeps a dead child from ending the test session."""
    return Supervisor(lambda *event, **_: events.append(event))


@pytest.fixture
async def host(supervisor: Supervisor) -> AsyncIterator[MeshHost]:
    """An owner of processes that is closed, and checked, after the test."""
    host = MeshHost(supervisor, stop_deadline_s=5.0)
    yield host
    pids = [actor.pid for actor in host.actors]
    await host.close()
    assert not any(is_alive(pid) for pid in pids)


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this session find the warm start that the first of them makes."""
    return tmp_path_factory.mktemp("policies")
