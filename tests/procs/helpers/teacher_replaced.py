"""What a run has to say of an SDPO teacher that was killed."""

from __future__ import annotations

from live_run import LiveRun


def check_that_one_teacher_was_replaced(run: LiveRun) -> None:
    assert [event["actor"] for event in run.events("actor_died")] == ["sdpo_teacher"]
    (restarted,) = run.events("actor_restarted")
    assert restarted["actor"] == "sdpo_teacher"
    assert "at version " in restarted["detail"]
    assert run.summary()["restarts"] == 1
    assert run.events("run_failed") == []
