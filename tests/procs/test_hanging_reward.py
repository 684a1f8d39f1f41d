"""A run whose reward never returns on every third problem ends well, and no actor is restarted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from live_run import RUN_DEADLINE_S, launched

TASK = """
import re

from composer_mesh import Task, reward


class Backtracks(Task):
    def rows(self, split):
        return [{"question": f"{number} plus 1?", "number": number} for number in range(6)]

    def prompt(self, row):
        return row["question"]

    @reward
    def never_ends(self, transcript):
        if transcript.row["number"] % 3 == 0:
            re.match(r"(a+)+$", "a" * 64 + "b")
        return float(len(transcript.answer) % 7)

    def expert(self, messages):
        return str(int(messages[0]["content"].split()[0]) + 1)

    def corrupted(self, messages, rng):
        return "0"
"""
PLACE = r"never_ends \(.*backtracks\.py:17\), in match \("


def test_a_reward_that_holds_the_interpreter_costs_its_own_episodes_alone(
    tmp_path: Path, policy_cache: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "backtracks.py").write_text(TASK)
    settings = {
        "data.task": "backtracks.py:Backtracks",
        "run.steps": 2,
        "policy.warm_start.steps": 2,
        "policy.warm_start.demonstrations": 1,
        "policy.warm_start.hinted_share": 0.0,
        "schedule.prompts_per_step": 3,
        "schedule.group_size": 2,
        "supervision.restarts": 0,
        "supervision.rollout_retries": 1,
        "supervision.backoff_s": 0.05,
        "environment.hang_s": 2.0,
        "environment.replicas": 1,
        "sdpo.alpha": 0,
        "replay.beta": 0,
        "eval.episodes": 3,
    }
    with launched(tmp_path / "run", policy_cache, settings, tmp_path / "work") as run:
        status = run.process.wait(RUN_DEADLINE_S)
    assert status == 0, run.stderr
    assert json.loads((run.root / "summary.json").read_text())["restarts"] == 0

    kept = [json.loads(line) for line in (run.root / "poisoned.jsonl").read_text().splitlines()]
    poisoned = {(one["episode"]["split"], one["episode"]["index"]): one for one in kept}
    assert poisoned.keys() == {("train", 0), ("train", 3), ("heldout", 0)}
    for (split, index), one in poisoned.items():
        assert re.search(rf"{split} episode {index} of task .*at {PLACE}", one["error"]), one
        assert one["cause"] == "data"

    events = [json.loads(line) for line in (run.root / "events.jsonl").read_text().splitlines()]
    kinds = {one["event"] for one in events}
    assert not kinds & {"actor_died", "actor_hung", "actor_restarted", "actor_given_up"}
    details = [one["detail"] for one in events if one["event"] == "input_poisoned"]
    assert any(re.search(rf"episode \d of task .*at {PLACE}", one) for one in details), details
    steps = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["rollouts/count"] for step in steps) == 2 * len({1, 2, 4, 5})
