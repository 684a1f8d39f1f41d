"""What clients may not do: errors that say why, and no harm to others."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_world import CONTEXT, named_snapshot, served, training_body

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server.results import ForwardBackwardRequest, RecentAnswers

SAMPLE: dict[str, Any] = {
    "base_model": "base",
    "prompt": {"chunks": [{"tokens": [3, 4, 5]}]},
    "sampling_params": {"max_tokens": 2},
}


async def test_others_models_weights_samplers_and_answers_are_unknown(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        mine, theirs = world.client("tml-one"), world.client("tml-two")
        model = await mine.model()
        await theirs.model()
        asked = await mine.train(model, 1)
        saved = (await mine.result(await mine.post("save_weights", model_id=model, path="w")))[
            "path"
        ]
        sampler = await mine.post(
            "create_sampling_session",
            session_id=mine.session,
            sampling_session_seq_id=0,
            model_path=(await named_snapshot(mine, model)),
        )
        await theirs.train(model, 2, status=404)
        await theirs.raw(asked, status=404)
        for path, body in {
            "get_info": {"model_id": model},
            "optim_step": {"model_id": model, "adam_params": {}},
            "save_weights": {"model_id": model},
            "unload_model": {"model_id": model},
            "weights_info": {"tinker_path": saved},
            "load_weights": {"model_id": model, "path": saved, "optimizer": True},
            "session_heartbeat": {"session_id": mine.session},
            "asample": SAMPLE | {"sampling_session_id": sampler["sampling_session_id"]},
        }.items():
            answer = await theirs.post(path, 404, **body)
            assert "of yours here" in answer["detail"]
        sampling = {"session_id": theirs.session, "sampling_session_seq_id": 0}
        await theirs.post("create_sampling_session", 404, **sampling, model_path=saved)
        await theirs.post("asample", 404, **SAMPLE | {"base_model": None, "model_path": saved})
        assert (await theirs.get("checkpoints"))["checkpoints"] == []
        runs = (await theirs.get("training_runs"))["training_runs"]
        assert [run["training_run_id"] for run in runs] == [f"{theirs.session}:train:0"]
        await theirs.post(f"sessions/{mine.session}/finish", 404, reason={"type": "success"})
        await mine.post(f"sessions/{mine.session}/finish", 204, reason={"type": "success"})
        where = f"/api/v1/training_runs/{model}/checkpoints/weights/w/ttl"
        assert (await theirs.http.put(where, json={"ttl_seconds": 5})).status_code == 404
        assert (await mine.http.put(where, json={"ttl_seconds": 0})).status_code == 400
        for ttl, expires in ((5, True), (None, False)):
            assert (await mine.http.put(where, json={"ttl_seconds": ttl})).status_code == 204
            shown = (await mine.get("checkpoints"))["checkpoints"]
            assert [
                one["expires_at"] is not None for one in shown if one["tinker_path"] == saved
            ] == [expires]
        own = await theirs.post("cancel_future", 204, request_id=asked["request_id"])
        assert own is None


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden", "x" * 200, "a\x00b", "-rf"])
async def test_names_of_weights_cannot_be_paths(tmp_path: Path, name: str) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        refusal = await client.post("save_weights", 400, model_id=model, path=name)
        assert "the name of saved weights" in refusal["detail"]
        await client.post("load_weights", 404, model_id=model, path="/etc/passwd", optimizer=False)


def broken(change: Any) -> bytes:
    message = ForwardBackwardRequest.FromString(training_body("MODEL", 1))
    change(message, message.data[0])
    return bytes(message.SerializeToString())


def resized(message: Any, datum: Any) -> None:
    del datum.loss_fn_inputs["target_tokens"].shape[:]
    datum.loss_fn_inputs["target_tokens"].shape.extend([10**9, 10**9])


def not_a_number(message: Any, datum: Any) -> None:
    weights = datum.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = np.full(6, np.nan, "<f4").tobytes(), 1
    weights.shape.append(6)


def sparse_beyond(message: Any, datum: Any) -> None:
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.sparse_csr.values = np.array([3], "<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 1, 1, 1, 1], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([7], "<i8").tobytes()
    del tensor.shape[:]
    tensor.shape.extend([6, 2])


def many(message: Any, datum: Any) -> None:
    for _ in range(8):
        message.data.add().CopyFrom(datum)


CHANGES = {
    "shape [1000000000, 1000000000]": resized,
    "not finite": not_a_number,
    "column indices beyond 2": sparse_beyond,
    "data has 9 sequences: send 1 to 8": many,
    "data has 0 sequences": lambda message, _: message.ClearField("data"),
    "loss_fn is 'exec'": lambda message, _: setattr(message, "loss_fn", "exec"),
    "lacks 'advantages'": lambda message, _: setattr(message, "loss_fn", "ppo"),
    "has no option 'beta'": lambda message, _: message.loss_fn_config.update({"beta": 1.0}),
    "ids from 5 to 100": lambda _, datum: set_tokens(datum, [5, 100]),
    "ids from -1": lambda _, datum: set_tokens(datum, [-1, 4]),
    f"{CONTEXT + 1} tokens": lambda _, datum: set_tokens(datum, [3] * (CONTEXT + 1)),
    "has shape [6]": lambda _, datum: set_tokens(datum, [3, 4]),
    "3 bytes of int32": lambda _, datum: setattr(
        datum.model_input[0].encoded_text, "tokens", b"abc"
    ),
    "is not text": lambda _, datum: datum.model_input[0].image.SetInParent(),
    "which cross_entropy does not read": lambda _, datum: datum.loss_fn_inputs["pickle"].CopyFrom(
        datum.loss_fn_inputs["target_tokens"]
    ),
}


def set_tokens(datum: Any, tokens: list[int]) -> None:
    datum.model_input[0].encoded_text.tokens = np.array(tokens, "<i4").tobytes()


async def test_data_that_cannot_be_trained_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        for expected, change in CHANGES.items():
            body = broken(change).replace(b"\x0a\x05MODEL", b"")
            refusal = await client.send(body, status=400)
            assert expected in refusal["detail"], expected
        assert "is not a ForwardBackwardRequest" in (await client.send(b"\xff" * 50, 400))["detail"]
        await client.raw(await client.train(model, 1))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate is -1"),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1 is 1.0"),
        ("optim_step", {}, "adam_params"),
        ("asample", SAMPLE | {"num_samples": 10**6}, "num_samples is 1000000"),
        ("asample", SAMPLE | {"prompt": {"chunks": []}}, "prompt has 0 tokens"),
        ("asample", SAMPLE | {"sampling_params": {"max_tokens": 99}}, "lower max_tokens"),
        ("asample", SAMPLE | {"sampling_params": {"temperature": "hot"}}, "temperature is 'hot'"),
        (
            "asample",
            SAMPLE | {"sampling_params": {"temperature": 1e-40}},
            "temperature is 1e-40: Value error, 1e-40 is above 0 and below 0.0001: use 0",
        ),
        ("asample", SAMPLE | {"sampling_params": {"temperature": 101}}, "less than or equal to 10"),
        ("asample", SAMPLE | {"sampling_params": {"top_p": 1e-40}}, "top_p is 1e-40"),
        ("asample", SAMPLE | {"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs is 1000000"),
        ("asample", SAMPLE | {"base_model": "other"}, "base_model is 'other': choose 'base'"),
        ("asample", SAMPLE | {"target_prompt_logprobs": {"data": [1], "shape": [9, 9]}}, "shape"),
        (
            "asample",
            SAMPLE | {"target_prompt_logprobs": {"data": [2**63, 1], "shape": [2, 1]}},
            "target_prompt_logprobs.data.0 is 9223372036854775808",
        ),
        ("create_model", {"base_model": "base"}, "session_id"),
    ],
)
async def test_requests_that_are_wrong_are_refused_by_value(
    tmp_path: Path, path: str, body: dict[str, Any], expected: str
) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        refusal = await client.post(path, 400, **{"model_id": model, **body})
        assert expected in refusal["detail"]


async def test_sparse_rows_whose_differences_wrap_around_are_refused(tmp_path: Path) -> None:
    message = ForwardBackwardRequest(seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.full(4, 5, "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype, values = 2, np.ones(4, "<i8")
    tensor.shape.extend([4, 2])
    tensor.sparse_csr.values = tensor.sparse_csr.col_indices = values.tobytes()
    rows = [0, 2**62, -(2**63), -(2**62), 4]  # each difference is 2^62 in 64 bits, but for the last
    tensor.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
    async with served(tmp_path) as world:
        client = world.client()
        message.model_id = await client.model()
        refusal = await client.send(message.SerializeToString(), status=400)
        assert "row indices that do not fit its values" in refusal["detail"]


async def test_large_compressed_and_unreadable_bodies_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(max_request_mb=0.01)) as world:
        client = world.client()
        refusal = await client.send(b"\x00" * 20_000, status=413)
        assert "above 10,000 bytes" in refusal["detail"]
        for headers, status in (({"content-encoding": "zstd"}, 415), ({}, 400)):
            path = "/api/v1/create_session"
            answer = await client.http.post(path, content=b"{" * 999, headers=headers)
            assert answer.status_code == status
        answer = await client.http.post("/api/v1/forward_backward", json={"data": []})
        assert answer.status_code == 415


async def test_too_many_open_operations_are_told_to_come_back(tmp_path: Path) -> None:
    limits = ServeConfig(max_open_per_client=50, max_open_operations=80)
    async with served(tmp_path, limits) as world:
        greedy, modest = world.client("tml-one"), world.client("tml-two")
        first, other = await greedy.model(), await modest.model()
        world.trainer.gate.clear()
        asked = [await greedy.train(first, seq, seed=seq) for seq in range(1, 51)]
        refusal = await greedy.train(first, 51, status=429)
        assert "50 operations of yours are open, of at most 50" in refusal["detail"]
        assert await greedy.train(first, 50, seed=50, status=429)
        own = await modest.train(other, 1)
        world.trainer.gate.set()
        await modest.raw(own)
        await greedy.raw(asked[-1])
        assert world.registry.models[first].position == 50


async def test_a_thousand_waiting_clients_are_all_answered(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        world.samplers.gate.clear()
        asked = [await client.post("asample", **SAMPLE) for _ in range(300)]
        waiting = [asyncio.create_task(client.raw(one)) for one in asked]
        await asyncio.sleep(0)
        world.samplers.gate.set()
        answers = await asyncio.gather(*waiting)
        assert {len(one.content) > 0 for one in answers} == {True}
        assert world.tasks.server.counts.total == 0


async def test_an_operation_whose_forerunner_never_comes_fails_by_name(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(gap_s=0.05)) as world:
        client = world.client()
        model = await client.model()
        answer = await client.result(await client.train(model, 3))
        assert "seq_id 3 waited" in answer["error"]
        assert "for 1, which was not received" in answer["error"]
        await client.raw(await client.train(model, 4))
        await client.train(model, 2, status=400)


async def test_keys_are_needed_where_there_are_some_and_never_told(tmp_path: Path) -> None:
    async with served(tmp_path, keys=["tml-0123456789abcdef"]) as world:
        stranger, known = world.client("tml-other"), world.client("tml-0123456789abcdef")
        await stranger.post("create_session", 401)
        await stranger.get("healthz")
        await known.post("create_session")
        for headers, status in (({"host": "evil.example"}, 421), ({"origin": "http://e.x"}, 403)):
            answer = await known.http.get("/api/v1/healthz", headers=headers)
            assert answer.status_code == status
        client = next(iter(world.registry.sessions.values())).client
        assert "0123456789abcdef" not in client


async def test_a_dropped_answer_is_gone_and_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, ServeConfig(result_s=1e-6)) as world:
        client = world.client()
        asked = await client.post("asample", **SAMPLE)
        await client.raw(asked)
        world.tasks.server._recent = RecentAnswers()
        await world.tasks.housekeeping.drop_expired()
        refusal = (await client.raw(asked, status=410)).json()
        assert "the answer was dropped" in refusal["detail"]


def pair_body(model: str, *sides: float) -> bytes:
    """Return a request of the three-channel loss whose sequences have these preferences."""
    message = ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="three_channel")
    for side in sides:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([3, 4], "<i4").tobytes()
        values = {"preference": [0.0, side], "logprobs": [0, -1], "advantages": 0, "weights": 0}
        for name, value in values.items():
            one = datum.loss_fn_inputs[name]
            one.dense = np.broadcast_to(np.float32(value), 2).astype("<f4").tobytes()
            one.dtype = 1
            one.shape.append(2)
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.array([4, 5], "<i8").tobytes(), 2
        targets.shape.append(2)
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    "sides", [(1.0,), (-1.0,), (1.0, 0.0, -1.0), (1.0, 1.0), (1.0, -1.0, -1.0)]
)
async def test_pairs_without_both_sides_in_order_are_refused(
    tmp_path: Path, sides: tuple[float, ...]
) -> None:
    async with served(tmp_path) as world:
        client = world.client()
        model = await client.model()
        refusal = await client.send(pair_body(model, *sides), 400)
        assert "is not a pair with" in refusal["detail"]
        await client.raw(await client.send(pair_body(model, 1.0, -1.0, 0.0)))


async def test_adapters_in_the_head_are_refused_where_samplers_have_none(tmp_path: Path) -> None:
    async with served(tmp_path, adapts_head=False) as world:
        client = world.client()
        session = (await client.post("create_session", 200))["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
        refusal = await client.post("create_model", 400, **asked, lora_config={"rank": 4})
        assert "create the model with train_unembed=False" in refusal["detail"]
        fine = {"rank": 4, "train_unembed": False}
        await client.post("create_model", 200, **asked, lora_config=fine)
