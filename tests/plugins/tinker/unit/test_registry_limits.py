"""What a server remembers of clients is bounded, and freed once nobody uses it."""

from pathlib import Path
from typing import Any

import pytest
from served_world import Client, World, served

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server.records import Saved

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
