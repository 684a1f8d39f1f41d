"""Keys of providers: where they come from, and that they are nowhere afterwards."""

import base64
import json
import logging
import os
import pickle
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hpack
import httpx
import pytest
from fake_provider import KEY, TEACHER, Script, ask, called, client, completion, error, fault, said

from composer_mesh.actors.provider.endpoint import HIDDEN, LONGEST_KEY, Secret
from composer_mesh.actors.provider.errors import ProviderAuthError


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


@pytest.mark.parametrize(
    "echo",
    [
        KEY,
        " ".join(KEY),
        f"{KEY[:5]} {KEY[5:]}",
        "\u200b".join(KEY),
        "\n- ".join(KEY),
        KEY.upper(),
        quote(KEY, safe="").replace("-", "%2D"),
        KEY.encode().hex(),
        *(
            base64.b64encode(before + KEY.encode() + b"!?").decode()
            for before in (b"", b"x", b"xy")
        ),
        base64.b64encode(f"Bearer {KEY}".encode()).decode(),
    ],
)
async def test_a_key_is_redacted_in_each_spacing_and_encoding(echo: str) -> None:
    """An id loses signs that no id has, so that a spaced key would be whole there."""
    reply = said(f"your key is {echo}!")
    body = {**json.loads(reply.content), "id": echo, "model": echo}
    answer = await ask(Script(httpx.Response(200, json=body, headers={"x-other": "1"})))
    for text in (answer.action_text, answer.request_id, answer.model):
        assert HIDDEN.strip("[]") in text
    assert signs(KEY) not in signs(repr(answer))
    assert signs(echo) not in signs(repr(answer))


def signs(text: str) -> str:
    return "".join(sign for sign in text.lower() if sign.isascii() and sign.isalnum())


def test_texts_without_the_key_are_as_they_were_and_cost_no_more_than_their_length() -> None:
    secret = Secret(KEY)
    for text in ("", "a\ud800b", KEY[:-1], "s k - " * 100_000, KEY[:8] * 50_000):
        assert secret.hide(text) == text
    assert secret.hide((KEY[:-1] + " " * 1000) * 500 + KEY).endswith(HIDDEN)
    assert Secret("short").hide("short") == "short"


async def test_the_key_is_in_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    await fault(Script(error(401, KEY)))
    await ask(Script(said("x")))
    assert KEY not in caplog.text


async def test_a_key_that_comes_back_in_disguise_is_hidden_too() -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in KEY)
    raw = json.dumps(completion({"content": "@"})).replace("@", escaped).encode()
    assert json.loads(raw)["choices"][0]["message"]["content"] == KEY
    inner = httpx.Response(200, content=raw)
    twice = called(f'{{"a": "{escaped}"}}')
    for reply in (inner, twice):
        answer = await ask(Script(reply))
        assert KEY not in repr(answer)
        assert "[key]" in answer.action_text
    failure = await fault(
        Script(httpx.Response(400, content=b'{"error": "%s"}' % escaped.encode()))
    )
    assert failure.text == "status 400: [key]"


async def test_a_key_in_a_providers_id_or_model_is_hidden() -> None:
    body = completion({"content": "x"}, model=KEY, id=KEY)
    answer = await ask(Script(httpx.Response(200, json=body, headers={"cf-ray": KEY})))
    assert KEY not in repr(answer)


async def test_no_frame_that_an_error_leaves_behind_holds_the_key() -> None:
    for reply in (error(401, KEY), httpx.ConnectError("x"), httpx.Response(200, text=KEY)):
        failure = await fault(Script(reply), attempts=1)
        for frame, _ in traceback.walk_tb(failure.__traceback__):
            if "composer_mesh" in frame.f_code.co_filename:
                assert KEY not in repr(frame.f_locals)
        assert failure.__context__ is None


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


async def test_a_key_comes_from_a_file(key_file: Path) -> None:
    script, teacher = Script(said("x")), replace(TEACHER, api_key_env=None, api_key_file=key_file)
    await ask(script, teacher)
    assert script.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(teacher) + str(pickle.dumps(teacher))


async def test_a_key_that_is_replaced_in_its_file_is_used_at_once(key_file: Path) -> None:
    script, teacher = Script(said("x"), said("y")), replace(TEACHER, api_key_file=key_file)
    async with client(script) as asking:
        for key in ("first-key-0001", "other-key-0002"):
            key_file.write_text(key)  # noqa: ASYNC240 - a test's own small file
            await asking.complete(teacher, [], [], seed=0)
    sent = [request.headers["authorization"] for request in script.requests]
    assert sent == ["Bearer first-key-0001", "Bearer other-key-0002"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "is not set or empty"),
        (b"two lines\nof text", "no HTTP header may"),
        (b"\xff\xfe", "no HTTP header may"),
        (b"x" * (LONGEST_KEY + 1), f"at most {LONGEST_KEY} are read"),
    ],
)
async def test_a_file_without_a_usable_key_is_named(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    failure = await fault(Script(), replace(TEACHER, api_key_file=path))
    assert isinstance(failure, ProviderAuthError)
    assert f"{path}" in str(failure)
    assert says in str(failure)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ProviderAuthError, match="is a FIFO and not a regular file"):
        client(Script()).check(replace(TEACHER, api_key_file=path))


def test_a_key_file_that_others_can_read_is_named_once(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking, teacher = client(Script()), replace(TEACHER, api_key_file=key_file)
    asking.check(teacher)
    assert caplog.text == ""
    key_file.chmod(0o644)
    asking = client(Script())
    for _ in range(3):
        asking.check(teacher)
    assert caplog.text.count("other users can read") == 1
    assert KEY not in caplog.text


def test_the_layer_below_http2_does_not_log_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client(Script())
    hpack.Encoder().encode([("authorization", f"Bearer {KEY}")])
    assert KEY not in caplog.text


def _everything(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure)) + repr(failure) + str(vars(failure))
