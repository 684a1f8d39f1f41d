"""The shared runs as fixtures: each is made once a session, several side by side.

They are made from the first test on, and tests that need none come first. With workers of xdist
each makes the runs of its own tests when they ask, so `make test` starts these tests without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shared_runs
from live_run import PRESET, SHORT
from side_by_side import Make, SideBySide
from two_hosts import two_hosts

from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.load import load_config
from composer_mesh.tasks.loading import make_task

MAKES: dict[str, Make] = {
    make.__name__: make
    for make in (
        two_hosts,
        shared_runs.controller_killed,
        shared_runs.replicas_killed,
        shared_runs.carried,
        shared_runs.synchronous,
        shared_runs.trainer_killed,
        shared_runs.colocated_killed,
        shared_runs.colocated,
        shared_runs.asynchronous,
        shared_runs.paid_replay,
        shared_runs.interrupted,
        shared_runs.teacher_killed,
        shared_runs.policy_alone,
        shared_runs.late_replay,
        shared_runs.replay_lost,
        shared_runs.unsupervised,
        shared_runs.own_functions,
    )
}
"""In the order in which they start: the longest first."""
LONG_RUNS = {"policy_alone", "late_replay", "replay_lost", "unsupervised", "carried"}
"""Those that `make test` does not make: of options, or near to another one."""
AT_ONCE = "RUN_JOBS"
"""Environment variable: how many runs are made side by side."""
TIMEOUT_S = 1200.0
"""Of a test, which may wait for all runs that were started before its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if LONG_RUNS.intersection(read_by(item)):
            item.add_marker(pytest.mark.long)
    others = iter(sorted(here, key=lambda item: last_made(item)))
    items[:] = [next(others) if item in here else item for item in items]


def read_by(item: pytest.Item) -> list[str]:
    """The shared runs that a test reads: its fixtures, and those that a parameter names."""
    if not isinstance(item, pytest.Function):
        return []
    named = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [name for name in MAKES if name in item.fixturenames or name in named]


def last_made(item: pytest.Item) -> int:
    """The place of the last shared run that a test reads; -1 for a test that reads none."""
    return max((place for place, name in enumerate(MAKES) if name in read_by(item)), default=-1)


@pytest.fixture(scope="session")
def policies(policy_cache: Path) -> Path:
    """A folder with the warm start of the shortened preset, which each run would make otherwise."""
    values = {**SHORT, "policy.cache_dir": policy_cache}
    config = load_config(PRESET, [f"{key}={value}" for key, value in values.items()])
    prepare_policy(config, make_task(config))
    return policy_cache


@pytest.fixture(scope="session", autouse=True)
def side_by_side(
    request: pytest.FixtureRequest,
    servers: None,
    policy_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SideBySide]:
    """The runs that the collected tests read, of which the first ones have been started."""
    folder, at_once = tmp_path_factory.mktemp("runs"), int(os.environ.get(AT_ONCE, "3"))
    alone = not hasattr(request.config, "workerinput")
    asked = {name for item in request.session.items if alone for name in read_by(item)}
    if asked:
        request.getfixturevalue("policies")
    with SideBySide(MAKES, folder, policy_cache, at_once) as runs:
        runs.start(name for name in MAKES if name in asked)
        yield runs


def result_of(name: str) -> Callable[[SideBySide], Any]:
    """A fixture that waits until a shared run is made."""

    @pytest.fixture(scope="session", name=name)
    def result(side_by_side: SideBySide) -> Any:
        return side_by_side.result(name)

    return result


for _name in MAKES:
    globals()[f"result_of_{_name}"] = result_of(_name)
