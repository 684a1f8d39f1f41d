"""What a provider may send: bounded and not encoded, whatever it says of itself."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fake_provider import Script, ask, completion, error, fault, said

from composer_mesh.actors.provider.errors import (
    ProviderMalformed,
    ProviderRateError,
    ProviderRequestError,
)
from composer_mesh.actors.provider.http_transport import LARGEST_BODY, LARGEST_HEADERS
from composer_mesh.actors.provider.reply import MOST_VALUES, json_object

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
