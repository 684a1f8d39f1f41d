"""What a run shows of the error that ended it: few lines, the user's own first, the rest logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.user_code import CustomFunctionError
from composer_mesh.mesh.supervision import ActorDied, RemoteError
from composer_mesh.services.episodes.rollout import RolloutsFail
from composer_mesh.services.run.failure_report import MOST_LINES, report_failure

FRAME = "/home/me/my_loss.py:12, in my_loss\n    return inputs.trainer_logprobs[:-1]"
REMOTE = RemoteError("trainer", "train", "Traceback:\n" + "  File\n" * 150 + "KeyError: 'a'\n")


def user_error() -> CustomFunctionError:
    error = CustomFunctionError("my_loss.my_loss", "sequence 3", "it raised\n KeyError: 'a'", FRAME)
    error.__cause__ = REMOTE
    return error


def test_the_users_frame_is_first_and_the_traceback_in_a_log_that_is_named(tmp_path: Path) -> None:
    reported = report_failure(user_error(), tmp_path)
    log = tmp_path / "logs" / "errors.log"
    assert reported.text.splitlines() == [
        *FRAME.splitlines(),
        reported.line,
        f"the complete traceback is in {log}",
    ]
    assert reported.line == (
        "custom function 'my_loss.my_loss', sequence 3: it raised KeyError: 'a' "
        "(/home/me/my_loss.py:12)"
    )
    assert log.read_text().count("  File\n") == 150
    report_failure(user_error(), tmp_path)
    assert log.read_text().count("  File\n") == 300


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (REMOTE, "trainer.train failed: (host localhost, mesh trainer, rank 0) KeyError: 'a'"),
        (ValueError("one\n  two"), "ValueError: one two"),
        (ConfigError("x.toml: 40 problems\n" + "\n".join(["wrong"] * 40)), "x.toml: 40 problems w"),
        (RolloutsFail("step 2 has none", "KeyError: 'a'", FRAME), "step 2 has none; the last fai"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_long_error_is_a_line_and_the_name_of_the_log(
    error: Exception, line: str, tmp_path: Path
) -> None:
    reported = report_failure(error, tmp_path)
    assert reported.line.startswith(line)
    assert len(reported.text.splitlines()) <= MOST_LINES
    assert reported.text.splitlines()[-1].endswith("logs/errors.log")


@pytest.mark.parametrize("error", [ActorDied("generator-0", "killed"), ConfigError("lr is -1")])
def test_a_complete_message_is_shown_alone(error: Exception, tmp_path: Path) -> None:
    reported = report_failure(error, tmp_path)
    assert reported.text == reported.line
    assert str(error) in reported.line
    assert not (tmp_path / "logs").exists()


def test_a_traceback_that_cannot_be_logged_is_printed(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    text = report_failure(user_error(), tmp_path).text
    assert text.startswith(FRAME)
    assert "could not be written to" in text
    assert "  File\n" * 150 in text
