"""The deeper looks say what they need when they cannot be had."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, write_status

STATUS = RunStatus(os.getpid(), None, "running", 1, 2, 1, "tcp")
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("command", "status", "why"),
    [
        (["stacks"], {"state": "finished"}, "is not running"),
        (["stacks"], {}, "does not hold the lock of"),
        (["tui"], {}, "no admin server yet"),
        (["tui"], {"admin_url": NOBODY}, "needs a terminal"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_status_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: dict[str, Any],
    why: str,
) -> None:
    write_status(tmp_path, dataclasses.replace(STATUS, **status))
    name, *rest = command
    assert main([name, str(tmp_path), *rest]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
