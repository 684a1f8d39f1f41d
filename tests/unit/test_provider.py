"""The provider client against shaped faults: what is retried, what is final, what is never said."""

import asyncio
import contextlib
import json
import pickle
import random
import traceback
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from composer_mesh.actors import provider
from composer_mesh.actors.provider import ProviderClient, Retries, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider_errors import (
    ProviderAuthError,
    ProviderError,
    ProviderMalformed,
    ProviderPaymentError,
    ProviderRateError,
    ProviderRequestError,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider_reply import retry_after_s
from composer_mesh.rollouts.pairs import TeacherAnswer, canonical_action
from composer_mesh.rollouts.tool_calls import assistant_message, call_text

KEY = "sk-test-0123456789abcdef"
TEACHER = TeacherEndpoint("t1", "https://provider.test/v1/", "some/model", "TEST_KEY")
ASK = [{"role": "user", "content": "What is 2 plus 3?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]

Handler = Callable[[httpx.Request], Any]


def completion(message: dict[str, Any], **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c1", "object": "chat.completion", "choices": [choice], **extra}


def said(content: Any, **extra: Any) -> httpx.Response:
    return httpx.Response(200, json=completion({"role": "assistant", "content": content}, **extra))


def called(arguments: Any, name: Any = "calculator") -> httpx.Response:
    call = {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]}
    return httpx.Response(200, json=completion(message))


def error(status: int, text: str = "no", **headers: str) -> httpx.Response:
    body = {"error": {"message": text, "code": status}}
    return httpx.Response(
        status, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


class Script:
    """A provider that sends these replies in order and keeps the requests and the waits."""

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []
        self.waits: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def client(
    script: Script, total_s: float = 60.0, key: str = KEY, attempts: int = 4
) -> ProviderClient:
    return ProviderClient(
        Timeouts(total_s),
        Retries(attempts),
        environ={"TEST_KEY": key},
        transport=httpx.MockTransport(script),
        sleep=script.sleep,
    )


async def ask(script: Script, **options: Any) -> TeacherAnswer:
    async with client(script, **options) as asking:
        return await asking.complete(TEACHER, ASK, TOOLS, seed=11)


async def fault(script: Script, **options: Any) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await ask(script, **options)
    return caught.value


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


@pytest.mark.parametrize(
    "arguments", ['{"a": ', "[1]", "7", "", None, '{"a": 1}, "b": {}', "1" * 5000]
)
async def test_a_call_with_unreadable_arguments_is_an_answer_that_abstains(arguments: Any) -> None:
    answer = await ask(Script(called(arguments)))
    assert canonical_action(answer.action_text).kind == "malformed"
    assert answer.message == {"role": "assistant", "content": answer.action_text}


async def test_a_refusal_without_content_abstains() -> None:
    assert canonical_action((await ask(Script(said(None)))).action_text).kind == "malformed"


@pytest.mark.parametrize(
    ("usage", "usd", "known"),
    [
        ({"cost": 0.0125}, 0.0125, True),
        ({"cost": 0}, 0.0, True),
        ({"cost": None}, 0.0, False),
        ({"cost": "0.1"}, 0.0, False),
        ({"cost": -1}, 0.0, False),
        ({"cost": True}, 0.0, False),
        (None, 0.0, False),
    ],
)
async def test_cost_is_known_only_where_the_provider_gave_it(
    usage: Any, usd: float, known: bool
) -> None:
    answer = await ask(Script(said("x", usage=usage)))
    assert (answer.usd, answer.usd_known) == (usd, known)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (error(400), ProviderRequestError),
        (error(401), ProviderAuthError),
        (error(402), ProviderPaymentError),
        (error(403), ProviderAuthError),
        (error(404), ProviderRequestError),
        (httpx.Response(302, headers={"Location": "https://elsewhere.test"}), ProviderRequestError),
        (httpx.Response(200, text="<html>hello</html>"), ProviderMalformed),
        (httpx.Response(200, text='{"choices": [{"mess'), ProviderMalformed),
        (httpx.Response(200, content=b'{"choices": "\xff\xfe"}'), ProviderMalformed),
        (httpx.Response(200, json=[1]), ProviderMalformed),
        (httpx.Response(200, json={}), ProviderMalformed),
        (httpx.Response(200, json={"choices": []}), ProviderMalformed),
        (httpx.Response(200, json={"choices": [{"message": None}]}), ProviderMalformed),
        (httpx.Response(200, json=completion({"content": 5})), ProviderMalformed),
        (httpx.Response(200, json=completion({"tool_calls": "x"})), ProviderMalformed),
        (httpx.Response(200, json=completion({"tool_calls": [{}]})), ProviderMalformed),
        (
            httpx.Response(200, content=b'{"choices":[{"message":{"content":"\\ud800"}}]}'),
            ProviderMalformed,
        ),
        (called("{}", name=None), ProviderMalformed),
        (httpx.Response(200, content=b" " * (provider.LARGEST_BODY + 1)), ProviderMalformed),
    ],
)
async def test_a_final_failure_is_asked_once(
    reply: httpx.Response, kind: type[ProviderError]
) -> None:
    script = Script(reply)
    assert type(await fault(script)) is kind
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (error(408), ProviderTimeout),
        (error(429), ProviderRateError),
        (error(500), ProviderServerError),
        (httpx.Response(502, text="<html>Bad gateway</html>"), ProviderServerError),
        (error(529), ProviderServerError),
        (error(402, retry_after="0"), ProviderPaymentError),
        (httpx.ConnectError("refused"), ProviderServerError),
        (httpx.RemoteProtocolError("cut"), ProviderServerError),
        (httpx.ReadTimeout("slow"), ProviderTimeout),
        (httpx.ConnectTimeout("slow"), ProviderTimeout),
        (httpx.Response(200, json={"error": {"code": 429, "message": "busy"}}), ProviderRateError),
        (httpx.Response(200, json={"error": {"code": "502"}}), ProviderServerError),
        (httpx.Response(200, json={"error": "overloaded"}), ProviderServerError),
        (
            httpx.Response(200, json={"choices": [{"error": {"code": 502}, "message": {}}]}),
            ProviderServerError,
        ),
    ],
)
async def test_a_passing_failure_is_retried_within_its_bound(
    reply: Any, kind: type[ProviderError]
) -> None:
    script = Script(reply, reply, said("Answer: 5"))
    assert (await ask(script)).action_text == "Answer: 5"
    assert len(script.requests) == 3
    short = Script(*[reply] * 4)
    assert type(await fault(short)) is kind
    assert (len(short.requests), len(short.waits)) == (4, 3)


async def test_a_200_with_a_final_error_in_it_is_final() -> None:
    script = Script(httpx.Response(200, json={"error": {"code": 401, "message": "who?"}}))
    assert isinstance(await fault(script), ProviderAuthError)


async def test_waits_are_jittered_and_bounded() -> None:
    script = Script(*[error(500)] * 7, said("x"))
    await ask(script, attempts=8)
    assert len(set(script.waits)) == 7
    assert all(wait <= min(8.0, 0.25 * 2**n) for n, wait in enumerate(script.waits, 1))


async def test_retry_after_is_the_least_wait() -> None:
    script = Script(error(429, retry_after="7"), said("x"))
    await ask(script)
    assert 7.0 <= script.waits[0] <= 7.25


async def test_a_retry_after_beyond_the_total_is_not_waited_for() -> None:
    script = Script(error(429, retry_after="3600"))
    failure = await fault(script)
    assert isinstance(failure, ProviderRateError)
    assert (failure.retry_after_s, script.waits) == (3600.0, [])


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("12", 12.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
        ("soon", None),
        ("inf", None),
        ("nan", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert retry_after_s(header, now) == seconds


async def test_a_hang_ends_at_the_total_timeout() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    transport = httpx.MockTransport(hang)
    async with ProviderClient(Timeouts(0.05), environ={"TEST_KEY": KEY}, transport=transport) as c:
        with pytest.raises(
            ProviderTimeout, match=r"no answer within 0\.05 s: raise replay\.timeout"
        ):
            await c.complete(TEACHER, ASK, TOOLS, seed=0)


async def test_a_slow_drip_ends_at_the_total_timeout() -> None:
    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.001)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Drip()))
    async with ProviderClient(Timeouts(0.05), environ={"TEST_KEY": KEY}, transport=transport) as c:
        with pytest.raises(ProviderTimeout, match="no answer within"):
            await c.complete(TEACHER, ASK, TOOLS, seed=0)


@pytest.mark.parametrize("key", ["", "  \n"])
async def test_a_missing_key_names_its_variable_and_sends_nothing(key: str) -> None:
    script = Script()
    assert "TEST_KEY is not set or empty" in str(await fault(script, key=key))


@pytest.mark.parametrize("key", ["sk-secret\nX-Evil: 1", "sk-sécret-123", "sk secret 123"])
async def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    failure = await fault(Script(), key=key)
    assert isinstance(failure, ProviderAuthError)
    assert key not in _everything(failure)


async def test_a_key_that_ends_in_a_newline_works() -> None:
    script = Script(said("x"))
    await ask(script, key=f"{KEY}\n")
    assert script.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "reply",
    [
        error(401, f"Incorrect key {KEY}"),
        error(402, f"key {KEY} has no credit"),
        error(429, "x" * 190 + KEY),
        httpx.Response(500, text=f"headers: Bearer {KEY}"),
        httpx.Response(200, text=f"echo {KEY}"),
        httpx.Response(200, json={"error": {"message": KEY}}),
        httpx.ConnectError(f"could not send {KEY}"),
        httpx.ReadTimeout(f"waiting with {KEY}"),
    ],
)
async def test_the_key_is_in_no_error(reply: Any) -> None:
    failure = await fault(Script(*[reply] * 4))
    assert KEY not in _everything(failure)
    assert KEY.encode() not in pickle.dumps(failure)


async def test_a_key_that_is_echoed_does_not_reach_the_answer() -> None:
    answer = await ask(Script(said(f"your key is {KEY}")))
    assert KEY not in repr(answer)
    assert "[key]" in answer.action_text


async def test_the_key_is_in_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    await fault(Script(error(401, KEY)))
    await ask(Script(said("x")))
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "url", ["", "provider.test/v1", "ftp://x/v1", "http://u:p@x/v1", "http://x:port"]
)
def test_an_unusable_address_is_found_before_any_request(url: str) -> None:
    asking = client(Script())
    with pytest.raises(ProviderRequestError, match="base_url is not"):
        asking.check(TeacherEndpoint("t", url, "m"))


def _errors() -> list[type[ProviderError]]:
    return ProviderError.__subclasses__()


@pytest.mark.parametrize("kind", _errors())
def test_an_error_crosses_a_process_whole(kind: type[ProviderError]) -> None:
    sent = kind("t1", "status 1: no", 2.5)
    got = pickle.loads(pickle.dumps(sent))
    assert (type(got), str(got)) == (kind, str(sent))
    assert (got.teacher, got.retry_after_s, got.kind) == ("t1", 2.5, kind.kind)


@pytest.mark.parametrize("kind", _errors())
def test_an_error_names_the_teacher_and_the_repair(kind: type[ProviderError]) -> None:
    assert str(kind("t1", "what happened")) == f"teacher 't1': what happened: {kind.repair}"
    assert kind.repair


def test_each_kind_of_failure_has_one_class() -> None:
    assert len({kind.kind for kind in _errors()}) == len(_errors())


def test_jitter_comes_from_the_given_generator() -> None:
    failure = ProviderServerError("t", "x")
    one, same = (Retries().delay_s(1, failure, random.Random(3)) for _ in range(2))
    assert one == same


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


def _everything(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure)) + repr(failure) + str(vars(failure))
