"""Where a server may listen, and with what token."""

from __future__ import annotations

import os

import pytest

from composer_mesh.services.web.options import ListenOptions, ServeRefused, checked_token

LONG = "0123456789abcdef"


def test_beyond_loopback_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    assert checked_token(ListenOptions(), None) == ""
    assert checked_token(ListenOptions(host="::1"), None) == ""
    with pytest.raises(ServeRefused, match="--token-env"):
        checked_token(ListenOptions(host="10.0.0.7"), None)
    assert checked_token(ListenOptions(host="10.0.0.7"), "SERVED") == LONG


def test_no_process_of_the_server_inherits_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    assert checked_token(ListenOptions(), "SERVED") == LONG
    assert "SERVED" not in os.environ


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::"])
def test_public_addresses_are_named_twice(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED", LONG)
    with pytest.raises(ServeRefused, match="--any-address"):
        checked_token(ListenOptions(host=host), "SERVED")
    assert checked_token(ListenOptions(host=host, any_address=True), "SERVED") == LONG


@pytest.mark.parametrize("token", ["", "short", "with a\nline break in it", "ключ" * 8])
def test_a_token_that_could_be_guessed_or_not_sent_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVED", token)
    with pytest.raises(ServeRefused, match="at least 16 printable"):
        checked_token(ListenOptions(), "SERVED")
