"""Operations that fail, or end what executes them: they fail alone, and everyone else is served."""

import asyncio
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from served_world import BookkeepingTrainer, EchoSamplers, served

from composer_mesh.actors.sqlite_file import SqliteFile, StoreError
from composer_mesh.plugins.tinker.models.messages import TrainCall, TrainResult
from composer_mesh.plugins.tinker.server.backend import BackendLost
from composer_mesh.plugins.tinker.server.operation_log import KIND
from composer_mesh.plugins.tinker.server.records import (
    MOST_ATTEMPTS,
    Executing,
    Operation,
    OperationRequest,
)
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services.pool.dispatch import NoReplicaLeft

POISON = 66


def sample(token: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [3, token]}]}
    return {"base_model": "base", "prompt": prompt, "sampling_params": {"max_tokens": 2}, **more}


class FailingTrainer(BookkeepingTrainer):
    """Raises for a step of learning rate 0.5, and answers one of 0.25 with what JSON cannot say."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        rates = [call.adam.learning_rate for call in calls if call.adam]
        found = await super().execute(calls)
        if 0.5 in rates:
            raise self._error
        if 0.25 in rates:
            found[rates.index(0.25)] = TrainResult(metrics={"grad_norm": float("inf")})
        return found


class FailingSamplers(EchoSamplers):
    """Raises, or loses all that it samples, where a prompt ends with the poison."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.deaths = 0
        self._error = error
        self._under_way: set[asyncio.Future[None]] = set()

    async def sample(
        self, snapshot: str, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        found = await super().sample(snapshot, requests)
        poison = requests[0].prompt_ids[-1] == POISON
        if poison and not isinstance(self._error, BackendLost):
            raise self._error
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way.add(lost)
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            if poison:
                self.deaths += 1
                for one in self._under_way:
                    one.set_result(None)
                self._under_way.clear()
            if lost.done():
                raise BackendLost("the generator was killed")
        finally:
            self._under_way.discard(lost)
        return found


@pytest.mark.parametrize("error", [KeyError("shape"), OSError("no space"), RuntimeError("CUDA")])
async def test_any_error_of_an_operation_is_that_operations(
    tmp_path: Path, error: Exception
) -> None:
    async with served(tmp_path, trainer=FailingTrainer(error)) as world:
        client, other = world.client("tml-one"), world.client("tml-two")
        bad, good = await client.model(), await other.model()
        world.trainer.gate.clear()
        asked = [await client.step(bad, 1, lr=0.1), await client.step(bad, 2, lr=0.5)]
        asked += [await client.step(bad, 3, lr=0.25), await client.step(bad, 4, lr=0.1)]
        others = await other.train(good, 1)
        world.trainer.gate.set()
        answers = [await client.result(one) for one in asked]
        assert "error" not in answers[0]
        assert answers[1]["category"] == answers[2]["category"] == "server"
        assert f"its execution failed: {type(error).__name__}" in answers[1]["error"]
        assert "its execution failed: ValueError" in answers[2]["error"]
        assert "error" not in answers[3]
        assert b"error" not in (await other.raw(others)).content
        assert world.registry.models[bad].position == 2
        await world.tasks.store.need([bad])
        assert len(world.trainer.models[bad]) == 2


async def test_a_sample_that_raises_fails_alone(tmp_path: Path) -> None:
    samplers = FailingSamplers(IndexError("index 514 is out of bounds"))
    async with served(tmp_path, samplers=samplers) as world:
        client = world.client()
        asked = [await client.post("asample", **sample(token)) for token in (5, POISON, 6)]
        answers = [(await client.raw(one)).content for one in asked]
        assert b"its execution failed: IndexError: index 514" in answers[1]
        assert b"error" not in answers[0] + answers[2]


async def test_a_sample_that_kills_generators_is_given_up_and_the_others_are_answered(
    tmp_path: Path,
) -> None:
    samplers = FailingSamplers(BackendLost(""))
    async with served(tmp_path, samplers=samplers) as world:
        client, other = world.client("tml-one"), world.client("tml-two")
        tokens = (5, POISON, 6, 7, 8)
        asked = [await client.post("asample", **sample(token)) for token in tokens]
        more = [await other.post("asample", **sample(token)) for token in (9, 10, 11)]
        answers = [(await client.raw(one)).content for one in asked]
        answers += [(await other.raw(one)).content for one in more]
        poison = answers.pop(1)
        assert b"given up after 4 attempts" in poison
        assert b"the generator was killed" in poison
        assert not any(b"error" in one for one in answers)
        assert samplers.deaths == MOST_ATTEMPTS


async def test_an_operation_that_kills_the_server_is_given_up_by_its_next_starts(
    tmp_path: Path,
) -> None:
    """A copy of the folder, made while operations are executed, is what a kill would leave."""
    asked: dict[str, Any] = {}
    for kill in range(MOST_ATTEMPTS):
        trainer, samplers = BookkeepingTrainer(), EchoSamplers()
        trainer.gate.clear()
        samplers.gate.clear()
        async with served(tmp_path / f"{kill}", trainer=trainer, samplers=samplers) as world:
            client = world.client()
            if not kill:
                models = [await client.model(0), await client.model(1)]
                asked["bad"] = await client.train(models[0], 1)
                asked["poison"] = await client.post("asample", **sample(POISON))
                asked["waiting"] = await client.train(models[1], 1)
            await trainer.begun.get()
            await samplers.begun.get()
            shutil.copytree(tmp_path / f"{kill}", tmp_path / f"{kill + 1}")
    async with served(tmp_path / f"{MOST_ATTEMPTS}") as world:
        client = world.client()
        for name in ("bad", "poison"):
            answer = await client.result(asked[name])
            assert "given up after 4 attempts" in answer["error"]
            assert "the server ended in the last one" in answer["error"]
        assert b"error" not in (await client.raw(asked["waiting"])).content
        assert world.trainer.executed == 1
        assert world.samplers.asked == []


@pytest.mark.parametrize(
    "error", [NoReplicaLeft("trainer", "spent"), StoreError("a", "b", "c", "d"), sqlite3.Error()]
)
async def test_what_the_server_itself_lacks_ends_it(tmp_path: Path, error: Exception) -> None:
    async def work() -> None:
        async with served(tmp_path, trainer=FailingTrainer(error)) as world:
            client = world.client()
            await client.step(await client.model(), 1, lr=0.5)
            await world.tasks.server.ended.wait()

    with pytest.raises(type(error)):
        await work()


def test_a_log_of_an_earlier_version_is_refused_with_the_repair(tmp_path: Path) -> None:
    SqliteFile(tmp_path / "log.sqlite", KIND).close()
    with closing(sqlite3.connect(tmp_path / "log.sqlite")) as rows:
        rows.execute("PRAGMA user_version = 1")
    with pytest.raises(StoreError, match=r"its version is 1, not 4\): serve from another --output"):
        SqliteFile(tmp_path / "log.sqlite", KIND)


def test_what_a_killed_process_executed_is_known_to_the_next(tmp_path: Path) -> None:
    def operation(number: int) -> Operation:
        return Operation(number, str(number), OperationRequest("c", "sample", "", None, b""), 0)

    first = Executing(tmp_path / "executing")
    with first.during([operation(5), operation(2**40)]), first.during([operation(7)]):
        with first.during([operation(9)]):
            pass
        assert Executing(tmp_path / "executing").left == [5, 7, 2**40]
        with first.during([operation(8)]):
            assert Executing(tmp_path / "executing").left == [5, 7, 8, 2**40]
    after = Executing(tmp_path / "executing")
    assert after.left == []
    assert (tmp_path / "executing").stat().st_size == 4 * 8
    after.clear()
    assert (tmp_path / "executing").stat().st_size == 0
