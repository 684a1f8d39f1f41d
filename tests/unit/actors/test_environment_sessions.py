"""Sessions of an environment actor belong to the caller that opened them."""

from __future__ import annotations

from typing import Any

import pytest
from in_process_calls import InProcessCalls

from composer_mesh.actors.environment import EnvironmentActor, UnknownSession
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.tasks.toolbox import ToolboxTask


async def test_a_dead_callers_sessions_are_dropped_and_no_others(
    toolbox: ToolboxTask, build_config: Any
) -> None:
    actor = EnvironmentActor()
    await own_endpoint(actor, "load")(build_config())
    callers = {name: InProcessCalls(name, actor) for name in ("rollouts-0", "rollouts-1")}
    for name, calls in callers.items():
        for number in range(2):
            await calls.call("begin", f"{name}/{number}", toolbox.episode("train", number))
    assert actor.in_use() == 4
    await own_endpoint(actor, "hang_up")("rollouts-0")
    assert actor.in_use() == 2
    with pytest.raises(UnknownSession):
        await callers["rollouts-1"].call("finish", "rollouts-0/0")
    for number in range(2):
        await callers["rollouts-1"].call("finish", f"rollouts-1/{number}")
    assert actor.in_use() == 0
