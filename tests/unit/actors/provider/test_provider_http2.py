"""The provider client over HTTP/2: it is offered, one connection carries many questions, and the
faults that only HTTP/2 has end one question at most.

The server speaks HTTP/2 without TLS, so that no certificate is needed; what TLS offers is read
from the client's first bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from fake_provider import ASK, KEY, PATIENT, CeilingMeter, completion

from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderServerError


class H2Provider:
    """Answers by a question's seed; keeps count of connections, and resets or leaves on request."""

    def __init__(self) -> None:
        self.connections = 0
        self.hanging = asyncio.Event()
        self.resets = 0
        self.headers: list[dict[str, str]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        http.initiate_connection()
        bodies: dict[int, bytes] = {}
        with contextlib.closing(writer), contextlib.suppress(OSError):
            writer.write(http.data_to_send())
            while data := await reader.read(65536):
                for event in http.receive_data(data):
                    self._take(http, event, bodies)
                writer.write(http.data_to_send())

    def _take(self, http: Any, event: Any, bodies: dict[int, bytes]) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self.headers.append({k.decode(): v.decode() for k, v in event.headers})
            bodies[event.stream_id] = b""
        elif isinstance(event, h2.events.DataReceived):
            bodies[event.stream_id] += event.data
            http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.resets += 1
        elif isinstance(event, h2.events.StreamEnded):
            self._answer(http, event.stream_id, json.loads(bodies[event.stream_id])["seed"])

    def _answer(self, http: Any, stream: int, seed: int) -> None:
        if seed == 13:
            return http.reset_stream(stream)
        if seed == 14:
            return http.close_connection()
        if seed == 15:
            return self.hanging.set()
        body = json.dumps(completion({"content": f"Answer: {seed}"})).encode()
        http.send_headers(stream, [(":status", "200"), ("cf-ray", f"ray-{seed}")])
        return http.send_data(stream, body, end_stream=True)


@pytest.fixture
async def served() -> AsyncIterator[tuple[H2Provider, TeacherEndpoint]]:
    provider = H2Provider()
    async with await asyncio.start_server(provider.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield provider, TeacherEndpoint("t", f"http://127.0.0.1:{port}/v1", "m", "TEST_KEY")


def client() -> ProviderClient:
    return ProviderClient(
        Timeouts(20.0),
        RetryDelays(attempts=1),
        PATIENT,
        environ={"TEST_KEY": KEY},
        transport=httpx.AsyncHTTPTransport(http1=False, http2=True),
    )


async def test_many_questions_share_one_connection(
    served: tuple[H2Provider, TeacherEndpoint],
) -> None:
    provider, teacher = served
    async with client() as asking:
        await asking.complete(teacher, ASK, [], seed=0)
        seeds = range(20, 32)
        answers = await asyncio.gather(
            *(asking.complete(teacher, ASK, [], seed=seed) for seed in seeds)
        )
    assert [answer.action_text for answer in answers] == [f"Answer: {seed}" for seed in seeds]
    assert [answer.request_id for answer in answers] == [f"ray-{seed}" for seed in seeds]
    assert provider.connections == 1
    assert {told["authorization"] for told in provider.headers} == {f"Bearer {KEY}"}
    assert len({told["x-request-id"] for told in provider.headers}) == 13


async def test_a_reset_stream_fails_one_question_and_no_other(
    served: tuple[H2Provider, TeacherEndpoint],
) -> None:
    provider, teacher = served
    async with client() as asking:
        await asking.complete(teacher, ASK, [], seed=0)
        ends = await asyncio.gather(
            *(asking.complete(teacher, ASK, [], seed=seed) for seed in (1, 13, 2)),
            return_exceptions=True,
        )
    assert [type(end) for end in ends[1:2]] == [ProviderServerError]
    assert [end.action_text for end in (ends[0], ends[2])] == ["Answer: 1", "Answer: 2"]
    assert provider.connections == 1


async def test_a_server_that_leaves_fails_with_a_typed_error_and_is_asked_again(
    served: tuple[H2Provider, TeacherEndpoint],
) -> None:
    provider, teacher = served
    async with client() as asking:
        with pytest.raises(ProviderServerError, match="the connection broke"):
            await asking.complete(teacher, ASK, [], seed=14)
        assert (await asking.complete(teacher, ASK, [], seed=1)).action_text == "Answer: 1"
    assert provider.connections == 2


async def test_a_cancelled_question_ends_its_stream_and_leaves_the_others(
    served: tuple[H2Provider, TeacherEndpoint],
) -> None:
    provider, teacher = served
    meter = CeilingMeter()
    async with client() as asking:
        await asking.complete(teacher, ASK, [], seed=0)
        question = asyncio.create_task(asking.complete(teacher, ASK, [], seed=15, meter=meter))
        await provider.hanging.wait()
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        assert (await asking.complete(teacher, ASK, [], seed=1)).action_text == "Answer: 1"
    assert (meter.charges, meter.open) == ([1000], {})


async def test_http2_is_offered_over_tls() -> None:
    hello = asyncio.get_running_loop().create_future()

    async def read_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello.set_result(await reader.read(65536))
        writer.close()

    async with await asyncio.start_server(read_hello, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        teacher = TeacherEndpoint("t", f"https://127.0.0.1:{port}/v1", "m")
        meter = CeilingMeter()
        async with ProviderClient(Timeouts(20.0), RetryDelays(attempts=1)) as asking:
            with pytest.raises(ProviderServerError) as caught:
                await asking.complete(teacher, ASK, [], seed=0, meter=meter)
    offered = await hello
    assert b"\x02h2" in offered
    assert b"\x08http/1.1" in offered
    assert "no connection" in caught.value.text
    assert meter.charges == [0]
