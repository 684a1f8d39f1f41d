"""Real Monarch processes: what they inherit, and that none of them outlives its test.

The conftest of each folder of process tests imports it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from surroundings import as_before, forget_surroundings  # noqa: F401

from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.mesh.loop_watchdog import REPORTS
from composer_mesh.mesh.private_folder import PRIVATE

forget_surroundings()
prepare_environment()
LOOP_REPORTS = tempfile.TemporaryDirectory(prefix="loops-")
os.environ[REPORTS] = LOOP_REPORTS.name  # before the first run of a fixture, whatever its scope
STATE_HOME = tempfile.TemporaryDirectory(prefix="state-")
os.environ["XDG_STATE_HOME"] = STATE_HOME.name  # where an account keeps its signing key
TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "procs" / "helpers"))
sys.path.append(str(TESTS / "unit" / "helpers"))
sys.path.extend(map(str, TESTS.glob("plugins/*/helpers")))
sys.path.insert(0, str(TESTS.parent / "benchmarks"))
# Children import the actors of the tests by name, and inherit only the environment.
# Workers take it from their parent: what is forked has to have the one of its server.
IMPORTED_FROM = os.environ.setdefault(
    "TESTS_IMPORTED_FROM", os.pathsep.join(path for path in sys.path if path)
)
os.environ["PYTHONPATH"] = IMPORTED_FROM
# Set here, or torch sets it when it is imported, which the parent of workers never does.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-tests")

import loop_reports  # noqa: E402
from commands import SERVERS  # noqa: E402
from warm_servers import warm_servers  # noqa: E402

from composer_mesh.mesh.processes import is_alive  # noqa: E402
from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402

Events = list[tuple[str, str, str]]


@pytest.fixture(scope="session", autouse=True)
def servers() -> Iterator[None]:
    """Servers for all runs and actors of this session, each of which would start one."""
    with nullcontext() if SERVERS in os.environ else warm_servers():
        yield


@pytest.fixture
def events() -> Events:
    """What the supervisor of a test has recorded."""
    return []


@pytest.fixture(autouse=True)
def no_event_loop_stands_still() -> Iterator[None]:
    """Fail a test in which the loop of a controller or an actor was blocked for half a second."""
    yield
    found = loop_reports.taken()
    assert not found, f"blocked event loops:\n{loop_reports.told(found)}"


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


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of a run; its path is short, as the run's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.delenv(PRIVATE, raising=False)  # set once this process has started an actor
        yield Path(path)


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this session find the warm start that the first of them makes."""
    return tmp_path_factory.mktemp("policies")
