"""How a run ends before its time: by a dead trainer, or by Ctrl-C at each moment of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from finished_work import check_that_finished_work_is_on_disk
from live_run import END_DEADLINE_S, ENDLESS, LiveRun, launched


def test_without_restarts_a_killed_trainer_ends_the_run_naming_it(
    tmp_path: Path, policy_cache: Path
) -> None:
    never = {"supervision.restarts": 0, "supervision.trainer_restarts": 0}
    with launched(tmp_path / "run", policy_cache, ENDLESS | never) as run:
        run.until_training()
        os.kill(run.pids()["trainer"], signal.SIGKILL)
        assert run.wait(END_DEADLINE_S) == 1
    assert run.stderr.startswith("composer-mesh: trainer died: ")
    assert run.stderr.count("\n") == 1
    assert [event["actor"] for event in run.events("actor_died")] == ["trainer"]
    assert ["trainer" in event["detail"] for event in run.events("run_failed")] == [True]
    check_that_finished_work_is_on_disk(run)


MOMENTS: dict[str, Callable[[LiveRun], object]] = {
    "first process of the mesh": lambda run: run.events("run_started") and len(run.living()) > 1,
    "word of the end": lambda run: "stopping actors" in run.stdout,
    "last event": lambda run: run.events("run_stopped"),
    "summary": lambda run: (run.root / "summary.json").exists(),
    "reward curve": lambda run: (run.root / "reward.png").exists(),
}


def test_ctrl_c_from_the_start_of_the_mesh_to_the_last_line_ends_cleanly(
    tmp_path: Path, policy_cache: Path
) -> None:
    with launched(tmp_path / "run", policy_cache, ENDLESS) as run:
        for what, moment in MOMENTS.items():
            run.until(moment, what)
            with suppress(ProcessLookupError):  # it may end as soon as its last file is there
                run.signal_group(signal.SIGINT)
        assert run.wait(END_DEADLINE_S) == 128 + signal.SIGINT
    assert run.stderr == ""
    assert run.summary()["steps"] == len(run.lines("metrics.jsonl"))
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "a resume continues from the beginning" in run.stdout
    assert len(run.events("run_stopped")) == 1


def test_ctrl_c_before_anything_started_ends_cleanly(tmp_path: Path, policy_cache: Path) -> None:
    with launched(tmp_path / "run", policy_cache, ENDLESS) as run:
        run.until(lambda run: (run.root / ".lock").exists(), "claim of the run directory")
        run.signal_group(signal.SIGINT)
        assert run.wait(END_DEADLINE_S) == 128 + signal.SIGINT
    assert run.stderr == ""
