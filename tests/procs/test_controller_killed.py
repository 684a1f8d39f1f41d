"""A controller that is killed takes its whole run along, whatever the run was doing.

What it kept outside the run directory lies in one folder, which the next start removes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from live_run import ENDLESS, GONE_DEADLINE_S, LiveRun, launched, wait_until

from composer_mesh.mesh.private_folder import remove_abandoned


def starting(run: LiveRun) -> bool:
    return len(run.living()) > 1


def loading(run: LiveRun) -> bool:
    return bool(run.events("policy_ready"))


def saving(run: LiveRun) -> bool:
    return any((run.root / "checkpoints").glob(".step-*")) or bool(run.events("checkpoint"))


@pytest.mark.parametrize("moment", [starting, loading, saving])
def test_no_process_outlives_a_killed_controller(
    tmp_path: Path, policy_cache: Path, temporary: Path, moment: Callable[[LiveRun], bool]
) -> None:
    settings = {**ENDLESS, "trainer.checkpoint_every": 1}
    with launched(tmp_path / "run", policy_cache, settings) as run:
        run.until(moment, moment.__name__)
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not run.living(), "end of the last process", GONE_DEADLINE_S)
    left = list(temporary.iterdir())
    assert len(left) == 1
    assert remove_abandoned(temporary) == left
