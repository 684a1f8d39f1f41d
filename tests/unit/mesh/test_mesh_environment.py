"""What is set before Monarch starts, and what stays out of the terminal."""

from __future__ import annotations

import os
import sys

import pytest

from composer_mesh.mesh.environment import NOISE, prepare_environment, without_noise


def test_a_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_MAX_CHUNK_SIZE_MB", "16")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    prepare_environment()
    assert os.environ["MONARCH_RDMA_MAX_CHUNK_SIZE_MB"] == "16"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_only_noise_is_kept_from_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise():
        for line in NOISE:
            os.write(2, line + b" ...\n")
        os.write(2, b"a real error\n")
        print("a result")
    assert capfd.readouterr() == ("a result\n", "a real error\n")


def test_what_was_written_before_a_failure_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), without_noise():  # noqa: PT012
        sys.stderr.write("the last words\n")
        raise KeyError
    assert capfd.readouterr().err == "the last words\n"
