"""The number of rollout workers grows with the episodes in flight, up to a bound."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.planning.mesh_layout import rollout_workers


@pytest.mark.parametrize(
    ("prompts", "size", "lag", "workers"),
    [(4, 4, 0, 1), (16, 16, 0, 1), (16, 16, 1, 2), (129, 2, 0, 2), (1000, 64, 3, 16)],
)
def test_there_is_a_worker_for_every_256_episodes_in_flight_and_32_at_most(
    build_config: Any, prompts: int, size: int, lag: int, workers: int
) -> None:
    schedule = {"prompts_per_step": prompts, "group_size": size, "max_lag": lag}
    evaluation = {"episodes": 1}
    assert rollout_workers(build_config(schedule=schedule, eval=evaluation)) == workers


def test_a_stated_number_of_workers_is_kept(build_config: Any) -> None:
    assert rollout_workers(build_config(rollouts={"workers": 3})) == 3
