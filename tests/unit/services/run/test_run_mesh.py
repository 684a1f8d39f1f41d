"""The actors of a run are started with the config that its placement has decided.

What fork servers import before the first fork.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from composer_mesh.services.pool.process_placement import ProcessPlacements
from composer_mesh.services.run import mesh
from composer_mesh.services.run.preload import PRELOAD


class Started(Exception):
    """What the trainer's ranks are started with."""


@pytest.mark.parametrize("stated", ["auto", True, False])
@pytest.mark.parametrize("recomputes", [False, True])
async def test_checkpointing_is_that_of_the_placement_unless_the_config_states_it(
    build_config: Any, monkeypatch: pytest.MonkeyPatch, stated: Any, recomputes: bool
) -> None:
    def ranks(config: Any, *_: Any) -> None:
        raise Started(config.trainer.activation_checkpointing)

    monkeypatch.setattr(mesh, "TrainerRanks", ranks)
    config = build_config(trainer={"activation_checkpointing": stated})
    placements = replace(ProcessPlacements.of(config), recomputes=recomputes)
    host: Any = SimpleNamespace(heartbeat=None, deadlines=SimpleNamespace(most=0))
    keys: Any = SimpleNamespace()
    with pytest.raises(Started) as started:
        await mesh.RunMesh.start(config, host, lambda *_: None, keys, placements=placements)
    assert started.value.args == (recomputes if stated == "auto" else stated,)


def test_nothing_that_is_imported_before_a_fork_imports_monarch() -> None:
    code = (
        "import importlib, sys; "
        "[importlib.import_module(name) for name in sys.argv[1:]]; "
        "sys.exit('monarch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *PRELOAD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
