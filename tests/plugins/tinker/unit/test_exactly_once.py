"""Operations are executed once, whatever is sent twice or dies meanwhile.

Those that fail, or end what executes them, fail alone, and everyone else is served.
"""

import asyncio
import random
import shutil
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from served_world import BookkeepingTrainer, Client, EchoSamplers, served

from composer_mesh.actors.sqlite_file import SqliteFile, StoreError
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.models.messages import TrainCall, TrainResult
from composer_mesh.plugins.tinker.server import training_lane
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


def changes(world: Any, model: str) -> int:
    return int(world.registry.models[model].position)


async def state(world: Any, model: str) -> list[str]:
    """Return the changes of a model, which the trainer takes in if it has lost it."""
    await world.tasks.store.need([model])
    return list(world.trainer.models[model])


async def test_a_request_that_is_sent_again_is_executed_once(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        first, again = await client.train(model, 1), await client.train(model, 1)
        assert first == again
        await client.raw(first)
        assert await client.train(model, 1) == first
        await client.raw(first)
        assert changes(world, model) == 1


async def test_another_request_with_the_same_number_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        await client.train(model, 1, seed=1)
        refusal = await client.train(model, 1, seed=2, status=400)
        assert "seq_id 1 was used for another request" in refusal["detail"]


async def test_a_sampler_that_is_asked_for_again_by_another_number_is_saved_once(
    tmp_path: Path,
) -> None:
    """As the SDK does where a server dies before it answers: the number is drawn for each try."""
    async with served(tmp_path) as world:
        client = world.client()
        asked = {"model_id": await client.model(), "seq_id": 1}
        first, again = [
            await client.post("save_weights_for_sampler", **asked, sampling_session_seq_id=number)
            for number in (0, 1)
        ]
        assert first == again
        saved = (await client.result(first))["sampling_session_id"]
        assert saved == f"{client.session}:sample:0"
        refusal = await client.post("save_weights_for_sampler", 400, **asked, path="other")
        assert "seq_id 1 was used for another request" in refusal["detail"]


async def test_operations_are_executed_by_number_in_whatever_order_they_come(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as world, served(tmp_path / "other") as other:
        models = []
        for one, order in ((world, (1, 2, 3, 4)), (other, (3, 4, 2, 1))):
            client = one.client()
            model = await client.model()
            asked = {n: await client.train(model, n, seed=n) for n in order}
            await client.raw(asked[4])
            models.append(await state(one, model))
        assert models[0] == models[1]


@pytest.mark.parametrize("endpoint", ["execute", "open", "save"])
async def test_a_trainer_that_dies_is_given_its_models_again(tmp_path: Path, endpoint: str) -> None:
    limits = ServeConfig(save_every=2)
    async with served(tmp_path, limits) as world, served(tmp_path / "other", limits) as other:
        found = []
        for one, dies in ((world, [endpoint] * 3), (other, [])):
            client = one.client()
            model = await client.model()
            for seq in range(1, 12, 2):
                if seq in (3, 5, 9) and dies:
                    one.trainer.dies_in.append(dies.pop())
                    one.trainer.die()
                    one.tasks.store.lost()
                await client.train(model, seq, seed=seq)
                answer = await client.result(await client.step(model, seq + 1))
                assert "error" not in answer
            found.append(await state(one, model))
        assert found[0] == found[1]
        assert len(found[0]) == 12


async def test_an_operation_that_kills_every_trainer_fails_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        bad, good = await client.model(0), await client.model(1)
        world.trainer.gate.clear()
        asked = await client.train(bad, 1)
        world.trainer.dies_in += ["execute"] * 4
        world.trainer.gate.set()
        answer = await client.result(asked)
        assert answer["category"] == "server"
        assert "given up after 4 attempts, in each of which a process was lost" in answer["error"]
        await client.raw(await client.train(good, 1))
        assert (changes(world, bad), changes(world, good)) == (0, 1)


async def test_a_server_that_is_killed_continues_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills server and trainer at random; the state is that of one that was never killed."""
    # Each kill may meet the same operation. When one is given up has a test of its own.
    monkeypatch.setattr(training_lane, "MOST_ATTEMPTS", 1000)
    rng, asked, model, session = random.Random(5), dict[int, Any](), "", ""
    last = 40
    for _ in range(12):
        async with served(tmp_path, ServeConfig(save_every=3), trainer=Dying(rng)) as world:
            client = world.client()
            client.session = session
            model = await client.model()
            session = client.session
            for seq in range(1, last + 1):
                if seq not in asked and len(asked) > last:
                    break
                asked[seq] = await send(client, model, seq)
                if rng.random() < 0.08:
                    break
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
    async with served(tmp_path) as world, served(tmp_path / "other") as other:
        found = []
        for one, own in ((world, session), (other, "")):
            client = one.client()
            client.session = own
            name = await client.model()
            for seq in range(1, last + 1):
                answer = await client.raw(await send(client, name, seq))
                assert b'"error"' not in answer.content
            assert changes(one, name) == last
            found.append(await state(one, name))
        assert found[0] == found[1]


async def send(client: Client, model: str, seq: int) -> Any:
    if seq % 3:
        return await client.train(model, seq, seed=seq)
    return await client.step(model, seq, lr=seq / 100)


class Dying(BookkeepingTrainer):
    """A trainer that dies at random, before or after it did what it was asked."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def _dies(self, endpoint: str) -> None:
        if self._rng.random() < 0.1:
            self.dies_in.append(endpoint)
        super()._dies(endpoint)


async def test_an_answer_outlives_the_server(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        asked = await client.train(model, 1)
        before = await client.raw(asked)
    async with served(tmp_path, runs=False) as world:
        again = await world.client().raw(asked)
        assert again.content == before.content
        assert again.headers["content-type"] == "application/x-protobuf"


async def test_a_sample_that_is_executed_again_has_the_same_seed(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        world.samplers.lost = 2
        client = world.client()
        await client.model()
        asked = await client.post(
            "asample",
            base_model="base",
            num_samples=2,
            prompt={"chunks": [{"tokens": [3, 4]}]},
            sampling_params={"max_tokens": 2},
        )
        await client.raw(asked)
        seeds = [one.seed for one in world.samplers.asked]
        assert len(seeds) == 6
        assert seeds[:2] == seeds[2:4] == seeds[4:]
        assert seeds[0] != seeds[1]


async def test_an_idle_model_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(models_in_memory=1)) as world:
        client = world.client()
        models = [await client.model(n) for n in range(3)]
        for seq in (1, 2):
            for model in models:
                await client.raw(await client.train(model, seq, seed=seq))
                assert set(world.trainer.models) == {model}
        assert [changes(world, model) for model in models] == [2, 2, 2]
        assert world.tasks.store.repeated == 0


async def test_answers_wait_for_the_log_and_the_next_operation_does_not(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client, written = world.client(), threading.Event()
        model = await client.model()
        world.trainer.gate.clear()
        first = await client.train(model, 1, seed=1)
        await world.trainer.begun.get()
        second = await client.train(model, 2, seed=2)
        world.commits.start(lambda _: written.wait())
        answers = [asyncio.create_task(client.raw(one)) for one in (first, second)]
        world.trainer.gate.set()
        try:
            await world.trainer.begun.get()
            assert not any(one.done() for one in answers)
        finally:
            written.set()
        for one in answers:
            assert b'"error"' not in (await one).content
        assert changes(world, model) == 2


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
