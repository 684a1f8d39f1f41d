"""How a question is sent to a provider, and how its answer is read.

The provider client over HTTP/2: it is offered, one connection carries many questions, and the
faults that only HTTP/2 has end one question at most.

The server speaks HTTP/2 without TLS, so that no certificate is needed; what TLS offers is read
from the client's first bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from fake_provider import (
    ASK,
    KEY,
    PATIENT,
    TEACHER,
    TOOLS,
    CeilingMeter,
    Script,
    ask,
    called,
    client,
    completion,
    error,
    said,
)

from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderRequestError, ProviderServerError
from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.tool_calls import ToolCall, assistant_message, call_text, parse_action


async def test_a_request_is_an_openai_chat_completion_with_tools() -> None:
    script = Script(said("Answer: 5"))
    await ask(script)
    request = script.requests[0]
    assert str(request.url) == "https://provider.test/v1/chat/completions"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    body = json.loads(request.content)
    assert (body["model"], body["messages"], body["seed"]) == ("some/model", ASK, 11)
    assert (body["tools"], body["tool_choice"]) == (TOOLS, "auto")


async def test_a_teacher_without_a_key_variable_gets_no_key() -> None:
    script = Script(said("hello"))
    async with client(script) as asking:
        free = TeacherEndpoint("local", "http://127.0.0.1:1/v1", "m")
        await asking.complete(free, ASK, [], seed=0)
    assert "authorization" not in script.requests[0].headers
    assert "tools" not in json.loads(script.requests[0].content)


async def test_a_tool_call_becomes_the_students_action_text() -> None:
    answer = await ask(Script(called('{"a": 2, "b": 3}')))
    assert answer.action_text == call_text("calculator", {"a": 2, "b": 3})
    assert answer.message == assistant_message(answer.action_text, "call_0")
    assert (answer.usd, answer.usd_known, answer.teacher) == (0.0, False, "t1")
    assert answer.latency_s > 0


@pytest.mark.parametrize("content", ["Answer: 5", [{"type": "text", "text": "Answer: 5"}]])
async def test_content_is_an_answer(content: Any) -> None:
    answer = await ask(Script(said(content)))
    assert answer.message == {"role": "assistant", "content": "Answer: 5"}


async def test_arguments_that_are_an_object_already_are_taken() -> None:
    assert (await ask(Script(called({"a": 2})))).action_text == call_text("calculator", {"a": 2})


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
async def test_a_call_without_arguments_is_a_call_however_it_is_sent(arguments: str) -> None:
    answer = await ask(Script(called(arguments)))
    action = parse_action(answer.action_text)
    assert isinstance(action, ToolCall)
    assert action.arguments == {}


@pytest.mark.parametrize(
    "arguments",
    ['{"a": ', "[1]", "7", None, '{"a": 1}, "b": {}', "1" * 5000, '{"a": 1, "a": 2}', '{"a": NaN}'],
)
async def test_a_call_with_unreadable_arguments_is_an_answer_that_abstains(arguments: Any) -> None:
    answer = await ask(Script(called(arguments)))
    assert canonical_action(answer.action_text).kind == "malformed"
    assert answer.message == {"role": "assistant", "content": answer.action_text}


async def test_a_refusal_without_content_abstains() -> None:
    assert canonical_action((await ask(Script(said(None)))).action_text).kind == "malformed"


async def test_what_a_teacher_may_be_asked_for_is_sent() -> None:
    script = Script(said("x"))
    asked = replace(TEACHER, max_tokens=77, temperature=0.0)
    await ask(script, asked)
    body = json.loads(script.requests[0].content)
    assert (body["max_tokens"], body["temperature"]) == (77, 0.0)
    assert not {"usage", "provider"} & body.keys()


async def test_each_attempt_has_an_id_of_its_own_that_the_question_settles() -> None:
    ids = []
    for _ in range(2):
        script = Script(error(500), said("x"))
        await ask(script)
        ids += [request.headers["x-request-id"] for request in script.requests]
    assert ids[:2] == ids[2:]
    assert ids[0].removesuffix("-0") == ids[1].removesuffix("-1") != ids[0]
    other = Script(said("x"))
    async with client(other) as asking:
        await asking.complete(TEACHER, ASK, TOOLS, seed=12)
    assert other.requests[0].headers["x-request-id"] != ids[0]


async def test_an_answer_tells_who_gave_it_and_what_was_counted() -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 4}
    reply = httpx.Response(
        200,
        json=completion({"content": "x"}, model="some/model-2\x1b[31m", usage=usage),
        headers={"x-request-id": "req-1\t<b>"},
    )
    answer = await ask(Script(reply))
    assert (answer.prompt_tokens, answer.completion_tokens) == (11, 4)
    assert (answer.model, answer.request_id) == ("some/model-2[31m", "req-1b")
    assert answer.cached is False


async def test_an_answer_that_ended_at_the_limit_of_tokens_says_so() -> None:
    for reason in ("length", "stop"):
        body = completion({"content": "x"})
        body["choices"][0]["finish_reason"] = reason
        answer = await ask(Script(httpx.Response(200, json=body)))
        assert answer.cut == (reason == "length")


async def test_a_question_that_is_no_json_is_refused() -> None:
    async with client(Script()) as asking:
        with pytest.raises(ProviderRequestError, match="cannot be written as JSON"):
            await asking.complete(TEACHER, [{"role": "user", "content": float("nan")}], [], seed=0)


async def test_a_closed_client_fails_with_a_typed_error() -> None:
    asking = client(Script(), attempts=1)
    await asking.aclose()
    with pytest.raises(ProviderServerError, match="the client is closed"):
        await asking.complete(TEACHER, ASK, TOOLS, seed=0)


async def test_two_teachers_of_one_name_are_refused() -> None:
    async with client(Script(said("x"))) as asking:
        await asking.complete(TEACHER, ASK, TOOLS, seed=0)
        with pytest.raises(ValueError, match="two different teachers are named 't1'"):
            await asking.complete(replace(TEACHER, model="other"), ASK, TOOLS, seed=0)


@pytest.mark.parametrize(
    "url", ["", "provider.test/v1", "ftp://x/v1", "http://u:p@x/v1", "http://x:port"]
)
def test_an_unusable_address_is_found_before_any_request(url: str) -> None:
    asking = client(Script())
    with pytest.raises(ProviderRequestError, match="base_url is not"):
        asking.check(TeacherEndpoint("t", url, "m"))


@contextlib.asynccontextmanager
async def local_provider(connections: list[int]) -> AsyncIterator[TeacherEndpoint]:
    """A provider on a real port that answers `x` and notes the peer of each connection."""
    body = json.dumps(completion({"content": "x"})).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("peername")[1])
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield TeacherEndpoint("t", f"http://127.0.0.1:{port}/v1", "m")


async def test_connections_are_kept_between_requests() -> None:
    connections: list[int] = []
    async with local_provider(connections) as teacher, ProviderClient(Timeouts(20.0)) as asking:
        for seed in range(3):
            await asking.complete(teacher, ASK, TOOLS, seed=seed)
    assert len(connections) == 1


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with local_provider([]) as teacher, ProviderClient(Timeouts(20.0)) as asking:
        answer = await asking.complete(teacher, ASK, TOOLS, seed=0)
    assert answer.action_text == "x"


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


def h2_client() -> ProviderClient:
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
    async with h2_client() as asking:
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
    async with h2_client() as asking:
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
    async with h2_client() as asking:
        with pytest.raises(ProviderServerError, match="the connection broke"):
            await asking.complete(teacher, ASK, [], seed=14)
        assert (await asking.complete(teacher, ASK, [], seed=1)).action_text == "Answer: 1"
    assert provider.connections == 2


async def test_a_cancelled_question_ends_its_stream_and_leaves_the_others(
    served: tuple[H2Provider, TeacherEndpoint],
) -> None:
    provider, teacher = served
    meter = CeilingMeter()
    async with h2_client() as asking:
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
