"""Clients of a training server in a process of their own, as real ones are, without an SDK.

A client's HTTP costs more than what the server does for it; in the server's process it would be
measured as the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import httpx
import numpy as np

from composer_mesh.plugins.tinker.models.messages import Datum
from composer_mesh.plugins.tinker.server.protobuf_messages import ForwardBackwardRequest

T = TypeVar("T")
RANK = 8


@dataclass(frozen=True)
class Load:
    """What each client trains: steps of some sequences."""

    steps: int
    sequences: int = 4
    length: int = 48


LONG, MIDDLE, SHORT = Load(1, 16, 256), Load(1), Load(1, 2, 16)


class Client:
    """A client without an SDK: its requests, and none of its own work."""

    def __init__(self, http: httpx.AsyncClient, number: int) -> None:
        self._http, self._number = http, number
        self._seq, self.model, self.session = 0, "", ""

    async def open(self) -> None:
        self.session = (await self._post("create_session"))["session_id"]
        lora = {"rank": RANK, "seed": self._number}
        base = {"base_model": "base", "model_seq_id": 0, "lora_config": lora}
        accepted = await self._post("create_model", session_id=self.session, **base)
        self.model = accepted["model_id"]

    async def step(self, load: Load) -> None:
        message = ForwardBackwardRequest(
            model_id=self.model, seq_id=self._seq + 1, loss_fn="cross_entropy"
        )
        for datum in data_of(self._seq + 1000 * self._number, load):
            one = message.data.add()
            one.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
            targets = one.loss_fn_inputs["target_tokens"]
            targets.dense, targets.dtype = datum.inputs["target_tokens"].tobytes(), 2
            targets.shape.append(load.length)
        body, headers = message.SerializeToString(), {"content-type": "application/x-protobuf"}
        answer = await self._http.post("/api/v1/forward_backward", content=body, headers=headers)
        adam = {"learning_rate": 1e-3}
        asked = [answer.json()]
        asked.append(
            await self._post(
                "optim_step", model_id=self.model, seq_id=self._seq + 2, adam_params=adam
            )
        )
        self._seq += 2
        for one in asked:
            await self._result(one)

    async def sample(self, tokens: int) -> float:
        begun = time.perf_counter()
        prompt = {"chunks": [{"tokens": [*range(3, 43)]}]}
        settings = {"max_tokens": tokens}
        await self._result(
            await self._post("asample", base_model="base", prompt=prompt, sampling_params=settings)
        )
        return time.perf_counter() - begun

    async def _result(self, accepted: Any) -> None:
        body = {"request_id": accepted["request_id"]}
        answer = await self._http.post("/api/v1/retrieve_future", json=body)
        assert b'"error"' not in answer.content, answer.content

    async def _post(self, path: str, **body: Any) -> Any:
        answer = await self._http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def data_of(seed: int, load: Load) -> tuple[Datum, ...]:
    """Return sequences of random tokens."""
    rng = np.random.default_rng(seed)
    return tuple(
        Datum(
            rng.integers(3, 90, load.length),
            {"target_tokens": rng.integers(3, 90, load.length)},
        )
        for _ in range(load.sequences)
    )


class ClientProcess:
    """A process of some clients of one server, with a model each."""

    def __init__(self, url: str, clients: int) -> None:
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_open_clients, initargs=(url, clients)
        )

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    async def models(self) -> list[str]:
        """Return the ids of the clients' models."""
        return await self._run(_models)

    async def steps_s(self, load: Load) -> list[float]:
        """Return the seconds of each step of the first client."""
        return await self._run(_steps_s, load)

    async def one_after_another_s(self, count: int, load: Load) -> float:
        """Return the seconds of all steps of the first `count` clients, a client at a time."""
        return await self._run(_one_after_another_s, count, load)

    async def all_at_once_s(self, count: int, load: Load) -> float:
        """Return the seconds of all steps of the first `count` clients at once."""
        return await self._run(_all_at_once_s, count, load)

    async def samples_s(self, count: int, tokens: int) -> list[float]:
        """Return the seconds of each of some samples, all at once."""
        return await self._run(_samples_s, count, tokens)

    async def _run(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


class _Clients:
    """The clients of this process, and the event loop that they run on."""

    def __init__(self, url: str, count: int) -> None:
        self._runner = asyncio.Runner()
        self._http = httpx.AsyncClient(base_url=url, timeout=120)
        self.clients = [Client(self._http, number) for number in range(count)]
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _open(self) -> None:
        for client in self.clients:
            await client.open()


_own: list[_Clients] = []


def _open_clients(url: str, count: int) -> None:
    _own.append(_Clients(url, count))


def _models() -> list[str]:
    return [one.model for one in _own[0].clients]


def _steps_s(load: Load) -> list[float]:
    async def work() -> list[float]:
        took = []
        for _ in range(load.steps):
            begun = time.perf_counter()
            await _own[0].clients[0].step(load)
            took.append(time.perf_counter() - begun)
        return took

    return _own[0].run(work())


async def _steps(client: Client, load: Load) -> None:
    for _ in range(load.steps):
        await client.step(load)


def _one_after_another_s(count: int, load: Load) -> float:
    async def work() -> float:
        begun = time.perf_counter()
        for client in _own[0].clients[:count]:
            await _steps(client, load)
        return time.perf_counter() - begun

    return _own[0].run(work())


def _all_at_once_s(count: int, load: Load) -> float:
    async def work() -> float:
        begun = time.perf_counter()
        await asyncio.gather(*(_steps(one, load) for one in _own[0].clients[:count]))
        return time.perf_counter() - begun

    return _own[0].run(work())


def _samples_s(count: int, tokens: int) -> list[float]:
    async def work() -> list[float]:
        clients = _own[0].clients
        return await asyncio.gather(
            *(clients[number % len(clients)].sample(tokens) for number in range(count))
        )

    return _own[0].run(work())
