"""Process tests: what they share, their order, and the servers that several workers use."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from process_tests import *  # noqa: F403
from warm_servers import warm_servers

WHOLE_SESSION = ExitStack()
LONGEST_FIRST = (
    *("test_harbor_examples.py", "test_trl_async.py", "test_sft.py", "test_islands_jobs.py"),
    *("test_hub.py", "test_islands.py", "test_ablate.py", "test_islands_torchft.py"),
    *("test_harness_mesh.py", "test_sdpo_mesh.py", "test_run_losses.py", "test_islands_ranks.py"),
    *("test_trl_equality.py", "test_serve_ranks.py", "test_hanging_reward.py", "test_hosts.py"),
    *("test_expert_parallel.py", "test_context_parallel.py", "test_launch.py", "test_mistakes.py"),
)
"""Files with the longest tests, which start first so that all workers end at about one time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take; the order within a file stays."""
    place = {name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several workers their parent starts the servers, which all of them share."""
    if session.config.getoption("numprocesses", None):
        WHOLE_SESSION.enter_context(warm_servers())


def pytest_sessionfinish() -> None:
    """End the servers that were started for the workers."""
    WHOLE_SESSION.close()
