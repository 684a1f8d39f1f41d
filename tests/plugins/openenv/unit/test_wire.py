"""The frames of OpenEnv as its server was recorded to send and take them."""

import json

import pytest
from pydantic import ValidationError

from composer_mesh.plugins.openenv.client.wire import (
    CLIENT_FRAME,
    SERVER_FRAME,
    ErrorFrame,
    ObservationFrame,
    ResetFrame,
    StateAt,
    StateFrame,
    StepFrame,
)


def test_frames_of_the_client_are_those_that_the_server_reads():
    reset = ResetFrame(data={"seed": 7, "episode_id": "ep-1"})
    assert json.loads(reset.model_dump_json()) == {
        "type": "reset",
        "data": {"seed": 7, "episode_id": "ep-1"},
    }
    step = StepFrame(data={"message": "hi"})
    assert step.model_dump() == {"type": "step", "data": {"message": "hi"}}
    assert StateFrame().model_dump(exclude_none=True) == {"type": "state"}
    at = StateFrame(data=StateAt(turn=3)).model_dump(exclude_none=True)
    assert at == {"type": "state", "data": {"turn": 3}}
    assert CLIENT_FRAME.validate_python(at) == StateFrame(data=StateAt(turn=3))


def test_frames_of_the_server_are_read():
    observation = SERVER_FRAME.validate_json(
        '{"type":"observation","data":{"observation":{"metadata":{}},"reward":2.0,"done":false,'
        '"metadata":{"error_kind":"none"}}}'
    )
    assert isinstance(observation, ObservationFrame)
    assert observation.data.reward == 2.0
    error = SERVER_FRAME.validate_json(
        '{"type":"error","data":{"message":"full","code":"CAPACITY_REACHED","active_sessions":1,'
        '"max_sessions":1}}'
    )
    assert isinstance(error, ErrorFrame)
    assert (error.data.code, error.data.max_sessions) == ("CAPACITY_REACHED", 1)


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"observation","data":{"observation":{},"reward":NaN}}',
        '{"type":"observation","data":{"observation":{},"reward":1e999}}',
        '{"type":"observation","data":{"observation":{},"reward":"1"}}',
        '{"type":"observation","data":{"observation":{},"done":"yes"}}',
        '{"type":"observation","data":{"observation":{},"done":1}}',
        '{"type":"observation","data":{"observation":[]}}',
        '{"type":"observation"}',
        '{"type":"telemetry","data":{}}',
        "[]",
    ],
)
def test_a_frame_of_another_shape_is_refused(text: str):
    with pytest.raises(ValidationError):
        SERVER_FRAME.validate_json(text)
