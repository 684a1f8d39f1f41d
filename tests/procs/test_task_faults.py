"""A run whose task does everything wrong that user code can: each fault costs its own episode."""

from __future__ import annotations

import json
import re
from pathlib import Path

from live_run import RUN_DEADLINE_S, launched

TASK = """
import random
import sys
import threading
import time

from composer_mesh import Reply, Session, Task, reward

FAULTS = ["none", "raises", "hangs", "nan", "long", "blocks", "prints", "exits"]


class Faulty(Session):
    async def start(self):
        fault = self.row["fault"]
        if fault == "raises":
            raise KeyError("of the user")
        if fault == "blocks":
            time.sleep(600)
        if fault == "prints":
            sys.stdout.buffer.write(bytes(range(256)) * 100)
            for _ in range(20):
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        if fault == "exits":
            sys.exit(3)

    def opening(self):
        if self.row["fault"] == "hangs":
            time.sleep(600)
        return self.row["question"]

    def reply(self, text):
        if self.row["fault"] == "long":
            return "x" * 10_000_000
        return Reply()


class Faults(Task):
    session_class = Faulty

    def rows(self, split):
        faults = FAULTS if split == "train" else ["none"] * 2
        return [
            {"question": f"{number} plus 1?", "fault": fault}
            for number, fault in enumerate(faults)
        ]

    @reward
    def right(self, transcript):
        if transcript.row["fault"] == "nan":
            return float("nan")
        return float(transcript.answer == self.expert(transcript.messages))

    def expert(self, messages):
        return str(int(messages[0]["content"].split()[0]) + 1)

    def corrupted(self, messages, rng):
        return "0"
"""


FAULTS = {
    1: r"start of task 'faults' failed at .*faulty\.py:\d+: KeyError: 'of the user'",
    2: "opening of task 'faults' did not return within 6 s",
    3: "reward 'right' of task 'faults' returned 'nan' for train episode 3: return a finite",
    5: r"(?s)has blocked its event loop for 6 s, at\n.*faulty\.py",
    7: r"start of task 'faults' failed at .*faulty\.py:\d+: SystemExit: 3",
}
"""What is said of the episodes whose attempts fail alike, by their index."""


def test_a_task_that_does_everything_wrong_costs_its_own_episodes_alone(
    tmp_path: Path, policy_cache: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "faulty.py").write_text(TASK)
    settings = {
        "data.task": "faulty.py:Faults",
        "run.steps": 2,
        "policy.warm_start.steps": 2,
        "policy.warm_start.demonstrations": 1,
        "policy.warm_start.hinted_share": 0.0,
        "schedule.prompts_per_step": 4,
        "schedule.group_size": 2,
        "supervision.rollout_retries": 1,
        "supervision.backoff_s": 0.05,
        "environment.call_s": 6.0,
        "environment.replicas": 2,
        "sdpo.alpha": 0,
        "replay.beta": 0,
        "eval.episodes": 2,
    }
    with launched(tmp_path / "run", policy_cache, settings, tmp_path / "work") as run:
        status = run.process.wait(RUN_DEADLINE_S)
    assert status == 0, run.stderr
    kept = [json.loads(line) for line in (run.root / "poisoned.jsonl").read_text().splitlines()]
    poisoned = {one["episode"]["index"]: one["traceback"] for one in kept}
    assert poisoned.keys() == FAULTS.keys()
    for index, said in FAULTS.items():
        assert re.search(said, poisoned[index]), poisoned[index]
    steps = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["rollouts/count"] for step in steps) == 2 * len({"none", "long", "prints"})
