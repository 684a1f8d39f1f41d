"""A rank of a trainer that is killed: the run goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

from live_run import launched
from restarted import assert_restarted_to_the_same
from shared_runs import SYNCHRONOUS, after_steps, kill_rank


def test_ranks_of_which_one_is_killed_train_the_same_steps_again(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {**SYNCHRONOUS, "trainer.ranks": 2}
    with launched(tmp_path / "killed", policy_cache, settings) as run:
        after_steps(run, 3)
        kill_rank(run, "trainer-1")
        assert run.wait() == 0, run.stderr
    assert_restarted_to_the_same(run, "trainer-1")
    assert [step["step"] for step in run.objects("metrics.jsonl")] == list(range(1, 7))
