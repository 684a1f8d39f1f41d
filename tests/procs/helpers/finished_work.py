"""What a run that was ended before its time has to have on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from live_run import ENDLESS, SHORT, LiveRun

from composer_mesh.rollouts.traces import Trace

ROLLOUTS_PER_STEP = SHORT["schedule.prompts_per_step"] * SHORT["schedule.group_size"]


def check_that_finished_work_is_on_disk(run: LiveRun) -> None:
    check_steps_are_on_disk(len(run.lines("metrics.jsonl")), run.traces(), run.summary())
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")


def check_steps_are_on_disk(steps: int, traces: Sequence[Trace], summary: dict[str, Any]) -> None:
    """The rollouts of all steps, and the steps in the summary."""
    trained = [trace for trace in traces if trace.split == "train"]
    assert len(trained) >= steps * ROLLOUTS_PER_STEP > 0
    assert summary["steps"] == steps
    assert summary["eval"]["initial"]["episodes"] == ENDLESS["eval.episodes"]
