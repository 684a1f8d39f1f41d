"""Turns on shared GPUs: never both sides at once, whatever dies or is interrupted between them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeHost
from fake_teachers import Ring, weights
from fake_teachers import config as taught
from fake_trainer import Running, batch
from healing_service import healing, until_served

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.services.service import Service
from composer_mesh.services.training.turns import DeviceTurns


class Ranks:
    """Ranks and generators of one device, which it never finds awake together."""

    def __init__(self) -> None:
        self.awake: dict[str, bool] = {"trainer": True}
        self.log: list[tuple[str, bool]] = []
        self.error: Exception | None = None
        self.slow: asyncio.Event | None = None

    async def on_all(self, _endpoint: str, awake: bool) -> list[Any]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if self.slow is not None:
            await self.slow.wait()
        self.hear("trainer", awake)
        return []

    def hear(self, name: str, awake: bool) -> None:
        sampling = name != "trainer"
        others = [one for one, on in self.awake.items() if on and (one != "trainer") != sampling]
        assert not (awake and others), f"{name} wakes while {others} are awake"
        self.awake[name] = awake
        self.log.append((name, awake))


class World:
    def __init__(self, host: FakeHost, pool: Service) -> None:
        self.ranks, self.host, self.training = Ranks(), host, asyncio.Event()
        self.turns = DeviceTurns(self.ranks, [pool], self.training)
        self.pool = pool


@pytest.fixture
async def world() -> World:
    host, events = FakeHost(), list[Any]()
    found = World(host, await healing(host, events, 2))

    def answer(endpoint: str, args: tuple[Any, ...]) -> None:
        if endpoint == "set_awake":
            found.ranks.hear("generators", args[0])

    host.answer = answer
    return found


async def test_who_leaves_is_asleep_before_the_others_wake(world: World) -> None:
    for _ in range(2):
        await world.turns.train()
        await world.turns.train()
        assert world.training.is_set()
        await world.turns.sample()
        await world.turns.sample()
        assert not world.training.is_set()
    sides = [(name, awake) for name, awake in world.ranks.log]
    once = [("generators", False)] * 2 + [("trainer", True), ("trainer", False)]
    assert sides == (once + [("generators", True)] * 2) * 2


async def test_a_trainer_that_dies_asleep_leaves_the_device_to_the_next_one(world: World) -> None:
    await world.turns.sample()
    world.ranks.error = ActorDied("trainer", "killed")
    with pytest.raises(ActorDied, match="trainer died: killed"):
        await world.turns.train()
    await world.turns.clear()  # a restart loads the new ranks
    world.ranks.hear("trainer", True)
    await world.turns.train()
    await world.turns.sample()
    assert world.ranks.awake == {"trainer": False, "generators": True}


async def test_a_switch_that_was_interrupted_is_made_again_from_the_beginning(world: World) -> None:
    await world.turns.train()
    world.ranks.slow = asyncio.Event()
    switch = asyncio.ensure_future(world.turns.sample())
    await asyncio.sleep(0)
    await cancel_and_wait([switch])
    world.ranks.slow = None
    await world.turns.train()
    assert world.ranks.awake == {"trainer": True, "generators": False}
    await world.turns.sample()
    assert world.ranks.awake == {"trainer": False, "generators": True}


async def test_a_generator_that_is_replaced_comes_up_in_the_turn_that_it_is(world: World) -> None:
    await world.turns.sample()
    await world.turns.train()
    world.host["w-0"].die()
    await until_served(world.pool, "w-0.2")
    heard = [args for endpoint, *args in world.host["w-0.2"].heard if endpoint == "set_awake"]
    assert heard == [[False]]
    await world.turns.sample()
    assert world.ranks.awake["generators"]


class Recorded:
    """Turns that write themselves into the log of a world."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    async def train(self) -> None:
        self.log.append(("turn", "training"))

    async def sample(self) -> None:
        self.log.append(("turn", "sampling"))

    async def clear(self) -> None:
        self.log.append(("turn", "cleared"))


def since(log: list[Any]) -> list[tuple[str, Any]]:
    """What happened since the last call, without the teachers' part in it."""
    found = [entry[:2] for entry in log if entry[0] in ("turn", "train", "begin", "save")]
    log.clear()
    return found


async def test_steps_checkpoints_and_restarts_take_the_turn_that_they_need(
    build_config: Any, tmp_path: Path
) -> None:
    shared = {"schedule": {"max_lag": 0}, "placement": {"colocate": True}}
    run = Running(build_config, tmp_path, trainer={"checkpoint_every": 9}, **shared)
    log, trained, sampled = run.world.log, ("turn", "training"), ("turn", "sampling")
    run.trainer._turns = Recorded(log)
    await run.trainer.train(batch(0))
    await run.trainer.sync()
    assert since(log) == [trained, ("train", 0), trained, sampled]
    run.world.fails["train"] = [ActorDied("trainer", "killed")]
    await run.trainer.train(batch(1))
    restarted = [("turn", "cleared"), ("begin", 0), trained, ("train", 0), trained, sampled]
    assert since(log) == [trained, *restarted, trained, ("train", 1)]
    await run.trainer.save(2)
    await run.trainer.saved()
    assert since(log) == [trained, sampled, ("save", 2)]


@pytest.mark.parametrize("teacher", ["live", "ema"])
async def test_a_teacher_that_is_replaced_waits_for_its_turn_before_it_takes_the_device(
    build_config: Any, teacher: str
) -> None:
    """Its state comes from another teacher, which is awake by then too."""
    training = asyncio.Event()
    settings = taught(build_config, teacher=teacher, replicas=2)
    ring = Ring(settings, turn=training)
    await ring.begin()
    training.set()
    await ring.sdpo.set_awake(True)
    await ring.sdpo.pull(weights(1))
    await ring.sdpo.set_awake(False)
    training.clear()
    ring.log.clear()
    ring.host.started[0].die()
    await ring.settle()
    assert ("load", "sdpo_teacher-0") in ring.log
    assert not ring.of("set_awake")
    training.set()  # the generators are asleep
    await ring.sdpo.set_awake(True)
    assert len(ring.sdpo.alive()) == 2
    first = ring.log.index(("set_awake", "sdpo_teacher-0", True))
    state = ("pull", "sdpo_teacher-0", 1) if teacher == "live" else ("adopt", "sdpo_teacher-0", 1)
    assert first < ring.log.index(state)
