"""An episode whose rollout worker is killed continues at its last turn, in the same session."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from killed_workers import started_pools
from numbered_generator import NumberedGenerator

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost

TURNS, KILLED_AT = 6, 3
TASK = f"""
import os
from pathlib import Path

from composer_mesh import Session, Task, reward

FOLDER = Path(__file__).parent


def note(text):
    with (FOLDER / "noted").open("a") as noted:
        noted.write(text + "\\n")


class Counted(Session):
    async def start(self):
        self.taken = 0
        note("start")

    def reply(self, text):
        self.taken += 1
        note(repr(text))
        if self.taken == {KILLED_AT} and (FOLDER / "gate").exists():
            note("waits")
            (FOLDER / "gate").read_text()  # a pipe: until the test opens it
        return None if self.taken == {TURNS} else f"{{self.taken}} taken"

    def close(self):
        note("close")


class Counting(Task):
    session_class = Counted

    def rows(self, split):
        return [{{"question": "count"}}]

    def prompt(self, row):
        return row["question"]

    @reward
    def counted(self, transcript):
        return 1.0
"""


def config_of(folder: Path, max_lag: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "resumed", "steps": 1},
            "data": {"task": f"{folder / 'counting.py'}:Counting"},
            "schedule": {"max_lag": max_lag, "group_size": 2, "prompts_per_step": 1},
        }
    )


def written(folder: Path, max_lag: int) -> Config:
    """Write the task and a tokenizer; return the config."""
    (folder / "counting.py").write_text(TASK)
    build_tokenizer(["count 1 taken"] * 40, 512).save_pretrained(folder / "tokenizer")
    return config_of(folder, max_lag)


@pytest.mark.parametrize(
    ("moment", "max_lag"), [("in a step", 1), ("in a generation", 1), ("in a generation", 0)]
)
async def test_a_killed_workers_episode_continues_and_no_action_is_executed_twice(
    moment: str, max_lag: int, tmp_path: Path, host: MeshHost
) -> None:
    gate = tmp_path / "gate"
    hangs_at = KILLED_AT if moment == "in a generation" else -1
    config, load = written(tmp_path, max_lag), (tmp_path / "sampled", hangs_at)
    async with started_pools(tmp_path, host, config, NumberedGenerator, *load) as pools:
        if moment == "in a step":
            os.mkfifo(gate)
        playing = pools.start()
        if moment == "in a step":
            await pools.until("noted", "waits")
            await pools.kill_the_worker()
            await asyncio.to_thread(gate.write_text, "")
            gate.unlink()
        else:
            await pools.until("sampled", f"train-000000-000-{KILLED_AT:02d}")
            await pools.kill_the_worker()
        trace = await playing
        assert trace is not None
        assert [kind for kind, *_ in pools.events] == ["rollout_retried"]
        assert f"resumed from turn {KILLED_AT}: " in pools.events[0][2]
        requests = pools.lines("sampled")
        assert len(requests) == TURNS + (moment == "in a generation")
        assert len(set(requests)) == TURNS  # the one that was lost has the same seed again
        figures = pools.rollouts.retries.figures()
        assert (figures["rollouts/retried"], figures["rollouts/resumed"]) == (1, 1)
        assert await pools.start() == trace  # as it is undisturbed
        await pools.until("noted", "close", 2)
        noted = [one for one in pools.lines("noted") if one != "waits"]
        assert len(noted) == 2 * (TURNS + 2)
        assert noted[: TURNS + 2] == noted[TURNS + 2 :]
        (about,) = await pools.environments.fanout("describe")
        assert about["in_use"] == 0
