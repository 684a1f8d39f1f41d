"""What a provider's failures are, which are final, and what is said about them.

What a provider may send: bounded and not encoded, whatever it says of itself.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fake_provider import (
    ASK,
    KEY,
    TEACHER,
    TOOLS,
    Script,
    ask,
    called,
    completion,
    error,
    fault,
    said,
)

from composer_mesh.actors.provider import errors as provider_errors
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import Timeouts
from composer_mesh.actors.provider.errors import (
    BreakerVerdict,
    ProviderAuthError,
    ProviderError,
    ProviderMalformed,
    ProviderModerationError,
    ProviderPaymentError,
    ProviderRateError,
    ProviderRequestError,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider.reply import (
    LARGEST_BODY,
    LARGEST_HEADERS,
    MOST_VALUES,
    json_object,
    retry_after_s,
)
from composer_mesh.rollouts.consensus import canonical_action


def refused(status: int, **told: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": "no", **told}})


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
        (httpx.Response(200, json={"error": {"code": 401, "message": "who?"}}), ProviderAuthError),
        (refused(403, metadata={"x": 1}), ProviderAuthError),
        (refused(429, code="insufficient_quota"), ProviderPaymentError),
        (httpx.Response(200, content=b" " * (LARGEST_BODY + 1)), ProviderMalformed),
    ],
)
async def test_a_final_failure_is_asked_once(
    reply: httpx.Response, kind: type[ProviderError]
) -> None:
    script = Script(reply)
    found = await fault(script)
    assert type(found) is kind
    assert found.status == (None if reply.status_code == 200 else reply.status_code)
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
        (refused(500, code="content_filter"), ProviderServerError),
        (
            httpx.Response(200, json={"choices": [{"message": {}, "finish_reason": "error"}]}),
            ProviderServerError,
        ),
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
    assert len(short.requests) == 4


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("12", 12.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
        ("Wednesday, 21-Oct-26 07:28:30 GMT", 30.0),
        ("Wed Oct 21 07:28:30 2026", 30.0),
        ("soon", None),
        ("inf", None),
        ("nan", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert retry_after_s(header, now) == seconds


def _errors() -> list[type[ProviderError]]:
    return ProviderError.__subclasses__()


@pytest.mark.parametrize("kind", _errors())
def test_an_error_with_the_teacher_and_the_repair_crosses_a_process_whole(
    kind: type[ProviderError],
) -> None:
    got = pickle.loads(pickle.dumps(kind("t1", "status 1: no", 2.5)))
    assert (type(got), str(got)) == (kind, f"teacher 't1': status 1: no: {kind.repair}")
    assert kind.repair
    assert (got.teacher, got.retry_after_s, got.kind) == ("t1", 2.5, kind.kind)


def test_each_kind_of_failure_has_one_class() -> None:
    assert len({kind.kind for kind in _errors()}) == len(_errors())


@pytest.mark.parametrize(
    "reply",
    [
        refused(403, code=403, metadata={"reasons": ["violence"], "flagged_input": "a secret"}),
        refused(400, code="content_filter"),
        refused(400, code=None, type="content_policy_violation"),
        refused(400, innererror={"code": "ResponsibleAIPolicyViolation"}),
        refused(200, code="content_filter"),
        refused(200, code=403, metadata={"reasons": ["violence"]}),
        httpx.Response(
            200,
            json={"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]},
        ),
    ],
)
async def test_moderation_is_a_failure_of_its_own_and_final(reply: httpx.Response) -> None:
    script = Script(reply)
    failure = await fault(script)
    assert type(failure) is ProviderModerationError
    assert "a secret" not in str(failure)
    assert len(script.requests) == 1


async def test_the_reasons_of_moderation_are_told() -> None:
    metadata = {"reasons": ["violence", "self\x1b-harm"], "flagged_input": "words"}
    failure = await fault(Script(refused(403, metadata=metadata)))
    assert failure.text == "status 403: no (violence, self-harm)"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": {"message": "first"}}, "status 400: first"),
        ({"error": "plain"}, "status 400: plain"),
        ({"detail": "of FastAPI"}, "status 400: of FastAPI"),
        ({"message": "bare"}, "status 400: bare"),
        ({"choices": [{"error": {"message": "inner"}}]}, "status 400: inner"),
        ({}, "status 400: it does not say why"),
        ({"error": {}}, "status 400: it does not say why"),
        ({"error": {"message": {"a": [1]}}}, "status 400: {'a': [1]}"),
    ],
)
async def test_a_servers_own_words_are_found(body: Any, says: str) -> None:
    assert (await fault(Script(httpx.Response(400, json=body)))).text == says


async def test_a_servers_words_are_cut_and_cannot_control_a_terminal() -> None:
    text = "\x1b]0;title\x07red\u202e " + "x" * 10_000
    failure = await fault(Script(error(400, text)))
    assert failure.text.startswith("status 400: ]0;titlered x")
    assert len(failure.text) < 220
    assert failure.text.isprintable()


@pytest.mark.parametrize(
    ("headers", "body_id", "shown"),
    [
        ({"x-request-id": "req-7"}, "gen-1", " (request req-7)"),
        ({"request-id": "req-8", "cf-ray": "ray"}, None, " (request req-8)"),
        ({"cf-ray": "8f-FRA"}, None, " (request 8f-FRA)"),
        ({}, "gen-1", " (request gen-1)"),
        ({"x-request-id": "<script>" * 99}, None, " (request " + ("script" * 40)[:80] + ")"),
        ({"x-request-id": " "}, 7, ""),
    ],
)
async def test_the_providers_own_id_is_told(
    headers: dict[str, str], body_id: Any, shown: str
) -> None:
    body = {"id": body_id, "error": {"message": "no"}}
    failure = await fault(Script(httpx.Response(400, json=body, headers=headers)))
    assert failure.text == f"status 400: no{shown}"


async def test_an_echo_of_our_own_id_is_not_the_providers() -> None:
    def echo(request: httpx.Request) -> httpx.Response:
        sent = request.headers["x-request-id"]
        return httpx.Response(400, json={"id": "own"}, headers={"x-request-id": sent})

    transport = httpx.MockTransport(echo)
    async with ProviderClient(Timeouts(9.0), environ={"TEST_KEY": KEY}, transport=transport) as c:
        with pytest.raises(ProviderRequestError, match=r"\(request own\)"):
            await c.complete(TEACHER, ASK, TOOLS, seed=0)


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("levels", [5, *range(100, 1100, 20), 100_000])
async def test_a_deeply_nested_body_is_malformed_or_abstains(levels: int) -> None:
    call = (
        b'{"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": @}}]}}]}'
    )
    as_text = json.dumps(nested(levels).decode()).encode()
    bodies = (nested(levels), call.replace(b"@", nested(levels)), call.replace(b"@", as_text))
    for body in bodies:
        for status in (200, 400):
            with contextlib.suppress(ProviderMalformed, ProviderRequestError):
                answer = await ask(Script(httpx.Response(status, content=body)))
                assert canonical_action(answer.action_text).kind in ("malformed", "call")


async def test_an_answer_that_is_announced_as_too_long_is_not_read() -> None:
    class Unread(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            raise AssertionError
            yield b""

    length = {"content-length": str(LARGEST_BODY + 1)}
    failure = await fault(Script(httpx.Response(200, stream=Unread(), headers=length)))
    assert failure.text == f"its answer is longer than {LARGEST_BODY} bytes"


def test_every_row_of_the_docstrings_table_is_so() -> None:
    verdicts = {"fails": "failed", "answers": "answered", "busy": "busy", "-": "nothing"}
    retried = {"no": (False, False), "yes": (True, True), "if it says when": (False, True)}
    rows = (provider_errors.__doc__ or "").split("\n\n")[1].splitlines()[1:]
    seen, kind = set(), ProviderError
    for row in rows:
        name, _, again, breaker = (
            row[a:b].strip() for a, b in ((4, 29), (29, 66), (66, 83), (83, 92))
        )
        kind = getattr(provider_errors, name) if name else kind
        seen.add(kind)
        told = (kind("t", "x").retryable, kind("t", "x", 1.0).retryable)
        assert (told, kind.verdict) == (retried[again], BreakerVerdict(verdicts[breaker])), row
    assert seen >= set(ProviderError.__subclasses__())


ANSWER = json.dumps(completion({"content": "Answer: 5"})).encode()


class Sent(httpx.AsyncByteStream):
    """A body in pieces, which counts those that were taken."""

    def __init__(self, body: bytes, piece: int = 2**16) -> None:
        self.pieces: Iterator[bytes] = iter(
            body[at : at + piece] for at in range(0, len(body), piece)
        )
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.taken += 1
            yield piece


def reply(body: bytes, headers: list[tuple[str, str]], piece: int = 2**16) -> httpx.Response:
    return httpx.Response(200, headers=headers, stream=Sent(body, piece))


@pytest.mark.parametrize("piece", [1, 7, 2**16])
async def test_an_answer_is_read_in_whatever_pieces_it_comes(piece: int) -> None:
    sent = reply(ANSWER, [("content-encoding", "identity")], piece)
    assert (await ask(Script(sent))).action_text == "Answer: 5"


async def test_no_encoding_is_asked_for() -> None:
    script = Script(said("x"))
    await ask(script)
    assert script.requests[0].headers["accept-encoding"] == "identity"


async def test_a_body_is_read_up_to_its_limit_and_no_further() -> None:
    sent = Sent(b"x" * 2 * LARGEST_BODY)
    failure = await fault(Script(httpx.Response(200, stream=sent)))
    assert failure.text == f"its answer is longer than {LARGEST_BODY} bytes"
    assert sent.taken == LARGEST_BODY // 2**16 + 1


@pytest.mark.parametrize(
    "headers",
    [
        [("content-encoding", "gzip")],
        [("content-encoding", "gzip, gzip")],
        [("content-encoding", "gzip"), ("content-encoding", "gzip")],
        [("content-encoding", "deflate")],
        [("content-encoding", "br")],
        [("content-encoding", "zstd")],
        [("content-encoding", "\x1b[31m" + "x" * 9000)],
    ],
)
async def test_an_encoded_answer_is_refused_unread(
    headers: list[tuple[str, str]],
) -> None:
    sent = Sent(gzip.compress(ANSWER))
    failure = await fault(Script(httpx.Response(200, headers=headers, stream=sent)))
    assert type(failure) is ProviderMalformed
    assert "no encoding was requested" in failure.text
    assert failure.text.isprintable()
    assert len(failure.text) < 120
    assert sent.taken == 0


async def test_headers_beyond_their_bound_are_refused_whatever_the_transport_lets_through() -> None:
    sent = Sent(ANSWER)
    headers = {f"x-{n}": "y" * 100 for n in range(LARGEST_HEADERS // 100)}
    failure = await fault(Script(httpx.Response(200, headers=headers, stream=sent)))
    assert failure.text == f"its headers are longer than {LARGEST_HEADERS} bytes"
    assert sent.taken == 0


async def test_a_provider_sets_no_cookies() -> None:
    bad_date = "a=b; expires=Thu, 01 Jan 99999 00:00:00 GMT; max-age=" + "9" * 500
    busy = error(429, set_cookie=bad_date)
    script = Script(busy, said("x"))
    await ask(script)
    assert "cookie" not in script.requests[1].headers


@pytest.mark.parametrize(
    "location", ["javascript:0", "http://[::1", "//", ":", "http://a:99999999/"]
)
async def test_a_redirect_to_no_address_is_a_refused_request(location: str) -> None:
    moved = httpx.Response(302, headers={"location": location})
    assert type(await fault(Script(moved))) is ProviderRequestError


@pytest.mark.parametrize(
    "value",
    [
        "Mon, 01 Jan 99999 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Mon, 01 Jan 2026 00:00:00 +99999999999999",
        "Mon, 01 Jan 2026 99:99:99 GMT",
        "1e400",
        "9" * 5000,
        "\u0661\u0662",
        "0x10",
        "1_000_000",
        ",",
        "",
    ],
)
async def test_no_retry_after_ends_more_than_its_query(value: str) -> None:
    headers = [(b"retry-after", value.encode())]
    failure = await fault(Script(httpx.Response(429, headers=headers)), attempts=1)
    assert type(failure) is ProviderRateError


@pytest.mark.parametrize(("levels", "fits"), [(64, True), (900, False), (10**6, False)])
def test_json_is_at_most_so_deep(levels: int, fits: bool) -> None:
    raw = b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    assert (json_object(raw) is not None) == fits


def test_json_holds_at_most_so_many_values() -> None:
    for count in (MOST_VALUES - 2, MOST_VALUES):
        raw = b'{"a":[' + b"0," * (count - 1) + b"0]}"
        assert (json_object(raw) is not None) == (count < MOST_VALUES)
