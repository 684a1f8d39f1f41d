"""What a server remembers of clients is bounded, and freed once nobody uses it.

The order of operations: by number for a model, by what they were served for clients.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from served_world import Client, World, served

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server.fair_queue import OpenCounts, SampleQueue, TrainingQueue
from composer_mesh.plugins.tinker.server.records import Operation, OperationRequest, Saved
from composer_mesh.services.web.errors import RequestRefused

AT_ONCE = 1e-6


async def sampler(client: Client, number: int, status: int = 200) -> Any:
    asked = {"session_id": client.session, "sampling_session_seq_id": number}
    return await client.post("create_sampling_session", status, **asked, base_model="base")


def sample(sampler: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler["sampling_session_id"],
        "prompt": {"chunks": [{"tokens": [3, 4]}]},
        "sampling_params": {"max_tokens": 2},
        "seq_id": 1,
    }


async def rows(world: World, table: str) -> int:
    select = f"SELECT COUNT(*) FROM {table}"
    found: int = await world.commits.run(lambda one: one.execute(select).fetchone()[0])
    return found


async def test_sessions_and_samplers_are_bounded_for_a_client_and_for_all(tmp_path: Path) -> None:
    limits = ServeConfig(
        max_sessions_per_client=2, max_sessions=3, max_samplers_per_client=2, max_samplers=3
    )
    async with served(tmp_path, limits) as world:
        one, two, three = (world.client(f"tml-{n}") for n in range(3))
        for client in (one, two):
            client.session = (await client.post("create_session"))["session_id"]
        await one.post("create_session")
        refusal = await one.post("create_session", 429)
        assert "you have 2 sessions and all clients 3, of at most 2 and 3" in refusal["detail"]
        await three.post("create_session", 429)
        await sampler(one, 0)
        await sampler(one, 1)
        assert "you have 2 samplers" in (await sampler(one, 2, 429))["detail"]
        await sampler(one, 1)
        await sampler(two, 0)
        assert "all clients 3" in (await sampler(two, 1, 429))["detail"]
        await one.post(f"sessions/{one.session}/finish", 204, reason={"type": "success"})
        await sampler(two, 1)
        await three.post("create_session")


async def test_idle_sessions_and_their_samplers_are_freed_and_models_stay(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(session_idle_s=AT_ONCE)) as world:
        idle, trains = world.client("tml-one"), world.client("tml-two")
        idle.session = (await idle.post("create_session"))["session_id"]
        model = await trains.model()
        drawn = [await sampler(client, 0) for client in (idle, trains)]
        for client, one in zip((idle, trains), drawn, strict=True):
            await client.raw(await client.post("asample", **sample(one)))
        await world.tasks.housekeeping.drop_expired()
        for client, one in zip((idle, trains), drawn, strict=True):
            assert "of yours here" in (await client.post("asample", 404, **sample(one)))["detail"]
        await idle.post("session_heartbeat", 404, session_id=idle.session)
        await trains.post("session_heartbeat", session_id=trains.session)
        assert await rows(world, "records WHERE kind = 'ClientSession'") == 1
        assert await rows(world, "records WHERE kind = 'SamplerSource'") == 0
        assert await rows(world, "operations WHERE kind = 'sample'") == 0
        assert b"error" not in (await trains.raw(await trains.train(model, 1))).content
    async with served(tmp_path) as world:
        assert b"error" not in (await trains_again(world, model)).content


async def trains_again(world: World, model: str) -> Any:
    client = world.client("tml-two")
    return await client.raw(await client.train(model, 2))


async def test_a_session_that_is_used_is_not_freed(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(session_idle_s=1000)) as world:
        client = world.client()
        client.session = (await client.post("create_session"))["session_id"]
        one = await sampler(client, 0)
        await world.tasks.housekeeping.drop_expired()
        await client.raw(await client.post("asample", **sample(one)))


async def test_unloaded_models_are_forgotten_with_all_their_records(tmp_path: Path) -> None:
    limits = ServeConfig(max_models_per_client=1, result_s=AT_ONCE, session_idle_s=AT_ONCE)
    async with served(tmp_path, limits) as world:
        client = world.client()
        for number in range(10):
            model = await client.model(number)
            await client.train(model, 1)
            await client.post("unload_model", model_id=model)
        asked = {"session_id": client.session, "model_seq_id": 10, "base_model": "base"}
        refusal = await client.post("create_model", 429, **asked, lora_config={"rank": 4})
        assert "you have 10 models, of which 10 are unloaded" in refusal["detail"]
        await world.tasks.housekeeping.drop_expired()
        assert [await rows(world, table) for table in ("records", "operations")] == [0, 0]
        client.session = ""
        kept = await client.model()
        await client.raw(await client.train(kept, 1))
        assert world.registry.models[kept].position == 1


async def test_a_model_with_saved_weights_is_remembered(tmp_path: Path) -> None:
    limits = ServeConfig(result_s=AT_ONCE, session_idle_s=AT_ONCE)
    async with served(tmp_path, limits) as world:
        client = world.client()
        model = await client.model()
        await client.result(await client.post("save_weights", model_id=model, path="w", seq_id=1))
        await client.post("unload_model", model_id=model)
        await world.tasks.housekeeping.drop_expired()
        shown = await client.get(f"training_runs/{model}/checkpoints")
        assert [one["checkpoint_id"] for one in shown["checkpoints"]] == ["weights/w"]
        await client.get(f"sessions/{client.session}")


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_saved_per_client": 1}, "you have 1 saved weights, of at most 1: delete some"),
        ({"max_saved_gb_per_client": 2.0}, "your saved weights have 2 GB, of at most 2: delete"),
        ({"max_saved_gb": 2.0}, "all clients' saved weights have 2 GB, of at most 2: delete some"),
    ],
)
async def test_saved_weights_are_bounded_in_number_and_bytes(
    tmp_path: Path, limits: dict[str, Any], told: str
) -> None:
    async with served(tmp_path, ServeConfig(**limits)) as world:
        client = world.client()
        model = await client.model()
        registry, spec = world.registry, world.registry.models[model].spec
        owner = registry.models[model].client
        path = f"tinker://{model}/weights/w"
        one = Saved(path, owner, model, "training", "", 2 * 10**9, 0.0, "", spec)
        registry.weights[path] = one
        asked = await client.post("save_weights", model_id=model, path="x", seq_id=1)
        assert told in (await client.result(asked))["error"]
        await client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/w")
        asked = await client.post("save_weights", model_id=model, path="x", seq_id=2)
        assert "error" not in await client.result(asked)


async def test_metadata_are_bounded_in_bytes(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        session = (await client.post("create_session"))["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
        asked |= {"lora_config": {"rank": 4}}
        for metadata in ({"a": "x" * 10_000, "b": "y" * 7_000}, {"deep": [{"z": [1] * 10_000}]}):
            refusal = await client.post("create_model", 400, **asked, user_metadata=metadata)
            assert "bytes of JSON, of at most 16,384: shorten it" in refusal["detail"]
        refusal = await client.post(
            "create_model", 413, **asked, user_metadata={"a": "x" * 300_000}
        )
        assert "the body is above 262,144 bytes: send less" in refusal["detail"]
        await client.post("create_model", **asked, user_metadata={"a": "x" * 9_000})


async def test_metadata_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        session = (await client.post("create_session"))["session_id"]
        body = f'{{"session_id": "{session}", "model_seq_id": 0, "base_model": "base", '
        body += '"lora_config": {"rank": 4}, "user_metadata": {"a": [NaN]}}'
        answer = await client.http.post("/api/v1/create_model", content=body)
        assert answer.status_code == 400
        assert "user_metadata" in answer.json()["detail"]


class Made:
    """Makes operations with numbers in order."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(
        self, client: str, model: str = "", seq: int | None = None, cost: int = 1
    ) -> Operation:
        self.number += 1
        kind = "forward" if model else "sample"
        request = OperationRequest(client, kind, model, seq, b"", model, cost)
        return Operation(self.number, f"r{self.number}", request, 0)


def test_each_model_is_served_in_order_whatever_the_order_of_arrival() -> None:
    rng, make, queue = random.Random(1), Made(), TrainingQueue()
    for model in "abc":
        queue.begin(model, f"client-{model}", 1)
    asked = [(model, seq) for model in "abc" for seq in range(1, 21)]
    rng.shuffle(asked)
    served: dict[str, list[int | None]] = {model: [] for model in "abc"}
    for model, seq in asked:
        queue.put(make(f"client-{model}", model, seq))
        if rng.random() < 0.3:
            for one in queue.take(2, 3, 100):
                served[one.model].append(one.request.seq)
    while taken := queue.take(2, 3, 100):
        for one in taken:
            served[one.model].append(one.request.seq)
    assert served == {model: [*range(1, 21)] for model in "abc"}
    assert len(queue) == 0


def test_a_client_with_many_models_gets_no_more_than_one_with_one() -> None:
    make, queue = Made(), TrainingQueue()
    for number in range(8):
        queue.begin(f"g{number}", "greedy", 1)
    queue.begin("m", "modest", 1)
    for seq in range(1, 101):
        for number in range(8):
            queue.put(make("greedy", f"g{number}", seq, cost=10))
        queue.put(make("modest", "m", seq, cost=10))
    counts = Counter(one.request.client for _ in range(40) for one in queue.take(1, 1, 1000))
    assert abs(counts["greedy"] - counts["modest"]) <= 1


def test_a_client_that_was_away_saves_nothing_up() -> None:
    make, queue = Made(), SampleQueue()
    for _ in range(100):
        queue.put(make("busy", cost=10))
    for _ in range(50):
        queue.take()
    for _ in range(50):
        queue.put(make("late", cost=10))
    served = [one.request.client for _ in range(40) if (one := queue.take()) is not None]
    assert 18 <= served.count("late") <= 22


def test_cost_counts_and_not_the_number_of_operations() -> None:
    make, queue = Made(), SampleQueue()
    for _ in range(200):
        queue.put(make("small", cost=1))
        queue.put(make("large", cost=9))
    served = Counter(one.request.client for _ in range(100) if (one := queue.take()) is not None)
    assert served["small"] > 6 * served["large"]


def test_operations_without_a_number_keep_their_order() -> None:
    make, queue = Made(), TrainingQueue()
    queue.begin("a", "one", 1)
    asked = [make("one", "a", seq) for seq in (1, None, 2, None)]
    for one in asked:
        queue.put(one)
    assert [one.number for one in queue.take(1, 10, 10)] == [1, 2, 3, 4]


def test_a_number_that_was_passed_is_refused() -> None:
    make, queue = Made(), TrainingQueue()
    queue.begin("a", "one", 1)
    queue.put(make("one", "a", 1))
    queue.take(1, 1, 1)
    with pytest.raises(RequestRefused, match="up to 1 of this model were executed"):
        queue.check_seq("a", 1)
    queue.check_seq("a", 2)


def refuses(counts: OpenCounts, client: str, size: int, status: int, said: str) -> None:
    with pytest.raises(RequestRefused, match=said) as refused:
        counts.add(client, size)
    assert refused.value.status == status


def test_open_operations_and_their_bytes_are_counted_for_each_client_and_for_all() -> None:
    limits = ServeConfig(
        max_open_operations=3, max_open_per_client=2, max_open_mb=1e-4, max_open_mb_per_client=6e-5
    )
    counts = OpenCounts(limits)
    counts.add("a", 10)
    counts.add("a", 50)
    refuses(counts, "a", 0, 429, "2 operations of yours are open, of at most 2")
    counts.remove("a", 10)
    refuses(counts, "a", 11, 429, "have 50 bytes and this one 11, of at most 60")
    refuses(counts, "b", 51, 429, "all open operations have 50 bytes and this one 51")
    refuses(counts, "b", 61, 413, "has 61 bytes, and those that wait at most 60")
    counts.add("b", 50)
    counts.add("b", 0)
    refuses(counts, "c", 0, 429, "3 operations are open, of at most 3")
    counts.add("c", 70, checked=False)
    for client, size in (("a", 50), ("b", 50), ("b", 0), ("c", 70)):
        counts.remove(client, size)
    assert (counts.total, counts.bytes) == (0, 0)


def test_operations_that_are_taken_together_have_bounded_bytes() -> None:
    queue = TrainingQueue()
    for model in "ab":
        queue.begin(model, model, 1)
        for seq in (1, 2, 3):
            request = OperationRequest(model, "forward", model, seq, b"", model)
            queue.put(Operation(ord(model) * seq, "", request, 40 * 2**20))
    taken = []
    while group := queue.take(8, 4, 10**9):
        taken.append([(one.model, one.request.seq) for one in group])
    assert taken == [[("a", 1), ("a", 2)], [("b", 1), ("b", 2)], [("a", 3), ("b", 3)]]
