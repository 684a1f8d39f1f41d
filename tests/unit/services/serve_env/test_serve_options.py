"""Where a task may be served, and with what token."""

from __future__ import annotations

import pytest

from composer_mesh.services.cli import main
from composer_mesh.services.serve_env.options import (
    ServeOptions,
    ServeRefused,
    WorkerStart,
    checked_token,
)

LONG = "0123456789abcdef"


def test_beyond_loopback_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    assert checked_token(ServeOptions(), None) == ""
    assert checked_token(ServeOptions(host="::1"), None) == ""
    with pytest.raises(ServeRefused, match="--token-env"):
        checked_token(ServeOptions(host="10.0.0.7"), None)
    assert checked_token(ServeOptions(host="10.0.0.7"), "SERVED") == LONG


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::"])
def test_public_addresses_are_named_twice(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    with pytest.raises(ServeRefused, match="--any-address"):
        checked_token(ServeOptions(host=host), "SERVED")
    assert checked_token(ServeOptions(host=host, any_address=True), "SERVED") == LONG


@pytest.mark.parametrize("token", ["", "short", "with a\nline break in it", "ключ" * 8])
def test_a_token_that_could_be_guessed_or_not_sent_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED", token)
    with pytest.raises(ServeRefused, match="at least 16 printable"):
        checked_token(ServeOptions(), "SERVED")


def test_the_token_is_in_no_text_of_a_start(build_config: object) -> None:
    start = WorkerStart(
        options=ServeOptions(),
        config=build_config(),  # type: ignore[operator]
        folder="x",
        number=0,
        token=LONG,
    )
    assert LONG not in repr(start)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--port", "70000"], "--port"),
        (["--processes", "0"], "--processes"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--session-timeout", "1e9"], "--session-timeout"),
        (["--host", "8.8.8.8"], "--any-address"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-env", "toolbox", *words]) == 2
    assert reason in capsys.readouterr().err
