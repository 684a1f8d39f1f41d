"""What is ordered of Slurm in a test: a fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.services.launch.ports import Order

HOST = {"name": "gpu", "count": 2, "cores": 8, "memory_gb": 64.0}

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
