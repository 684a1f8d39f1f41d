"""Operations are executed once, whatever is sent twice or dies meanwhile."""

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from served_world import BookkeepingTrainer, Client, served

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server import training_lane


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
