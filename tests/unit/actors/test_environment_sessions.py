"""Sessions of an environment actor belong to the caller that opened them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process_calls import InProcessCalls

from composer_mesh.actors.environment import UnknownSession
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.errors import TaskCodeError
from composer_mesh.tasks.toolbox import ToolboxTask


async def test_a_dead_callers_sessions_are_dropped_and_no_others(
    toolbox: ToolboxTask, build_config: Any, environment_actor: Any
) -> None:
    actor = environment_actor()
    await own_endpoint(actor, "load")(build_config())
    callers = {name: InProcessCalls(name, actor) for name in ("rollouts-0", "rollouts-1")}
    for name, calls in callers.items():
        for number in range(2):
            await calls.call("begin", f"{name}/{number}", toolbox.episode("train", number))
    assert actor.in_use() == 4
    await own_endpoint(actor, "close_calls")("rollouts-0")
    assert actor.in_use() == 2
    with pytest.raises(UnknownSession):
        await callers["rollouts-1"].call("finish", "rollouts-0/0")
    for number in range(2):
        await callers["rollouts-1"].call("finish", f"rollouts-1/{number}")
    assert actor.in_use() == 0


TASK = """
from composer_mesh import Session, Task, reward


class Broken(Session):
    def start(self):
        raise KeyError("of start")

    def close(self):
        self.never_set.close()


class Asks(Task):
    session_class = Broken

    def generate(self, rng):
        return {"question": str(rng.random())}

    def prompt(self, row):
        return row["question"]

    @reward
    def right(self, transcript):
        assert transcript.session is None
        return float(transcript.answer == "yes")
"""


async def test_a_session_that_cannot_start_is_told_by_its_start_and_messages_are_scored_without_one(
    tmp_path: Path, build_config: Any, environment_actor: Any
) -> None:
    (tmp_path / "asks.py").write_text(TASK)
    actor = environment_actor()
    await own_endpoint(actor, "load")(build_config(data={"task": f"{tmp_path}/asks.py:Asks"}))
    episode = Episode("asks", "train", 0)
    with pytest.raises(TaskCodeError, match="KeyError: 'of start'") as failed:
        await own_endpoint(actor, "begin")("session", episode)
    assert "never_set" in failed.value.__notes__[0]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    outcome = await own_endpoint(actor, "score")(episode, said)
    assert (outcome.reward, outcome.success) == (1.0, True)
