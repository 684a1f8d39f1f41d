"""The frames of OpenEnv as its server 0.10.0 was recorded to send and take them.

The recording is of the environment in tests/plugins/openenv/package, question by question; the last
answer is that of a full server, which nobody asked for.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.plugins.openenv.client.connection import full
from composer_mesh.plugins.openenv.client.server import TOOLS
from composer_mesh.plugins.openenv.client.session import text_of, tool_result
from composer_mesh.plugins.openenv.client.wire import (
    CLIENT_FRAME,
    SERVER_FRAME,
    ErrorFrame,
    ObservationFrame,
    StateReply,
)

RECORDED = json.loads((Path(__file__).parent / "recorded_0_10.json").read_text())
QUESTIONS = [question for question, _ in RECORDED]
ANSWERS = [SERVER_FRAME.validate_json(json.dumps(answer)) for _, answer in RECORDED]
RESET, STATE, LIST, ADDED, NEGATIVE, WRONG, UNKNOWN, INVALID, NONSENSE, TURN, END, FULL = ANSWERS


def observed(frame: Any) -> Any:
    assert isinstance(frame, ObservationFrame)
    return frame.data


def code_of(frame: Any) -> str:
    assert isinstance(frame, ErrorFrame)
    return frame.data.code


@pytest.mark.parametrize(
    "question", [one for one in QUESTIONS if one and one["type"] != "nonsense"]
)
def test_the_questions_are_frames_of_the_client(question: dict[str, Any]):
    read = CLIENT_FRAME.validate_python(question).model_dump(exclude_none=True)
    assert read == question


def test_observations_rewards_and_ends_are_read():
    assert text_of(observed(RESET), None) == ""
    assert (observed(RESET).reward, observed(RESET).done) == (None, False)
    assert tool_result(observed(ADDED)) == ("the counter is 1", None)
    assert (observed(END).reward, observed(END).done) == (1.0, True)


def test_the_state_and_the_tools_are_read():
    assert isinstance(STATE, StateReply)
    assert (STATE.data.episode_id, STATE.data.step_count) == ("e", 0)
    tools = TOOLS.validate_python(observed(LIST).observation["tools"])
    assert [tool.name for tool in tools] == ["add", "finish"]


@pytest.mark.parametrize(
    ("frame", "kind", "text"),
    [
        (NEGATIVE, "remote_execution_error", "below zero"),
        (WRONG, "remote_execution_error", "valid integer"),
        (UNKNOWN, "remote_tool_not_found", "Unknown tool"),
    ],
)
def test_failed_calls_are_errors_of_the_agent(frame: Any, kind: str, text: str):
    said, told = tool_result(observed(frame))
    assert told is not None
    assert told.kind == kind
    assert text in told.text
    assert text in said


def test_error_frames_have_the_codes_of_the_protocol():
    assert [code_of(frame) for frame in (INVALID, NONSENSE, TURN)] == [
        "VALIDATION_ERROR",
        "UNKNOWN_TYPE",
        "VALIDATION_ERROR",
    ]
    assert isinstance(FULL, ErrorFrame)
    assert "of 2 (Server at capacity" in str(full("http://x", FULL))
