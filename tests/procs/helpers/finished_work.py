"""What a run that was ended before its time has to have on disk."""

from __future__ import annotations

from live_run import ENDLESS, SHORT, LiveRun

ROLLOUTS_PER_STEP = SHORT["schedule.prompts_per_step"] * SHORT["schedule.group_size"]


def check_that_finished_work_is_on_disk(run: LiveRun) -> None:
    steps = run.objects("metrics.jsonl")
    trained = [trace for trace in run.traces() if trace.split == "train"]
    assert len(trained) >= len(steps) * ROLLOUTS_PER_STEP > 0
    assert run.summary()["steps"] == len(steps)
    assert run.summary()["eval"]["initial"]["episodes"] == ENDLESS["eval.episodes"]
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")
