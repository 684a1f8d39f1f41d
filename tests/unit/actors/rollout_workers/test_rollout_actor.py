"""The rollout actor as a whole: what it holds of others ends with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_host import turns
from in_process_calls import open_in_process

from composer_mesh.actors.rollout_workers.peers import Neighbours, OpenStream, Peer
from composer_mesh.actors.rollouts import RolloutActor
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.tasks import Episode


class InProcessRolloutActor(RolloutActor):
    def open_stream(self, name: str) -> OpenStream:
        return open_in_process(name)


class HangingEnvironment:
    """An environment that opens no session; `cancelled` once the call for one has ended."""

    def __init__(self) -> None:
        self.called, self.cancelled = asyncio.Event(), asyncio.Event()

    async def begin(self, *_: Any) -> Any:
        self.called.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def forget(self, *_: Any) -> None: ...


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_worker_that_ends_leaves_no_call_open(
    build_config: Any, tokenizer: Any, toolbox: Any, tmp_path: Any, max_lag: int
) -> None:
    tokenizer.save_pretrained(tmp_path)
    actor, environment = InProcessRolloutActor(), HangingEnvironment()
    config = build_config(schedule={"max_lag": max_lag})
    await own_endpoint(actor, "load")(config, tmp_path, {"toolbox": toolbox.tools})
    neighbours = Neighbours((), (Peer("environment-0", environment),), {})
    await own_endpoint(actor, "connect")("rollouts-0", neighbours)
    sample = Sample(Episode("toolbox", "train", 0, {}), 0, 0, Sampling.training(config))
    playing = asyncio.create_task(own_endpoint(actor, "play")(sample, "session"))
    await environment.called.wait()
    await actor.__cleanup__(None)
    with pytest.raises(SessionLost, match="the connection to it was closed"):
        await playing
    await turns()
    assert environment.cancelled.is_set()
