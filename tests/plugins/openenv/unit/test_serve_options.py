"""Where a task may be served, and with what token."""

from __future__ import annotations

import pytest

from composer_mesh.plugins.openenv.server.options import ServeOptions, WorkerStart
from composer_mesh.services.cli import main

LONG = "0123456789abcdef"


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
