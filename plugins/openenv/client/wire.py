"""The wire format of OpenEnv 0.10: JSON text frames over a WebSocket at `/ws`, one session each.

Client and server share it. Nothing here knows sockets. What is not OpenEnv's own is under
"Extensions".
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, TypeAdapter

from composer_mesh.configs.validation import fail_fast

SESSION_PATH = "/ws"
REWARDS_PATH = "/rewards"
HEALTH_PATH, SCHEMA_PATH, METADATA_PATH = "/health", "/schema", "/metadata"
LIST_PATH = "/list_environments"
SPLITS_PATH = "/{env}/splits"
NUM_TASKS_PATH, TASK_PATH = "/{env}/num_tasks", "/{env}/task"
TASKS_PATH, TASK_RANGE_PATH = "/{env}/tasks", "/{env}/task_range"

MOST_FRAME_BYTES = 16 * 2**20
"""Bytes of the longest frame by default; OpenEnv's own client takes 100 MB."""

MOST_EPISODE_ID = 255
RESERVED_TOOL_NAMES = frozenset({"reset", "step", "state", "close"})
"""Names that no tool of an environment may have."""


class ErrorCode(StrEnum):
    """Codes of error frames. After the last three the server closes the socket."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class ToolErrorType(StrEnum):
    """Kinds of a failed `call_tool`; errors that a tool itself tells are in its result."""

    INVALID_ARGS = "invalid_args"
    TOOL_NOT_FOUND = "tool_not_found"
    EXECUTION_ERROR = "execution_error"
    TIMEOUT = "timeout"
    TRANSPORT_ERROR = "transport_error"


# Extensions, in the `metadata` of an observation and in the frame `state`.

ERROR_KIND = "error_kind"
"""Metadata key: the kind of the agent's error; absent, or NO_ERROR, where there was none."""

NO_ERROR = "none"

HINT_TEMPLATE_KEY = "hint_template_key"
"""Metadata key: the hint template that fits the error."""

ERROR_FACTS = "error_facts"
"""Metadata key: texts by name that fill the fields of the hint template."""

ACCEPTED_ACTIONS = "accepted_actions"
"""Metadata key of the answer to a reset: what the environment takes besides calls of its tools, a
list of MESSAGE and FINISH."""

MESSAGE = "message"
"""The action `{"message": TEXT}`: a text of the agent that calls no tool."""

FINISH = "finish"
"""The action `{"type": "finish"}`: the agent cannot continue, and the episode is scored where
it is. It is no turn."""

ERROR_PENALTY = "error_penalty"
"""Key of the answer at METADATA_PATH: what the environment takes from an episode's reward for each
error of the agent; absent, or 0, where it takes nothing."""

TURN, MESSAGES = "turn", "messages"
"""`{"type": "state", "data": {"turn": t}}` is answered by a state with `turn` and `messages`: what
the agent had read when it acted at turn t (0-based). A server without it answers
VALIDATION_ERROR."""


# Frames of the client.


class _ClientFrame(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetFrame(_ClientFrame):
    """Begins an episode; `data` are the arguments of reset, such as `seed` and `episode_id`."""

    type: Literal["reset"] = "reset"
    data: dict[str, Any] = Field(default_factory=dict)


class StepFrame(_ClientFrame):
    """Acts; `data` are the fields of the action itself."""

    type: Literal["step"] = "step"
    data: dict[str, Any]


class StateAt(_ClientFrame):
    """Which turn a state is requested for (an extension)."""

    turn: int = Field(ge=0)


class StateFrame(_ClientFrame):
    """Asks for the state: the present one, or by our extension that of a turn."""

    type: Literal["state"] = "state"
    data: StateAt | None = None


class CloseFrame(_ClientFrame):
    """Ends the session; the server closes the socket without an answer."""

    type: Literal["close"] = "close"


class McpFrame(_ClientFrame):
    """A JSON-RPC request of MCP: `tools/list` or `tools/call`."""

    type: Literal["mcp"] = "mcp"
    data: dict[str, Any]


ClientFrame = Annotated[
    ResetFrame | StepFrame | StateFrame | CloseFrame | McpFrame, Field(discriminator="type")
]
CLIENT_FRAME: TypeAdapter[ClientFrame] = fail_fast(ClientFrame)


# Actions that every environment with tools takes.


class ListToolsAction(_ClientFrame):
    """Asks for the tools; needs no reset before."""

    type: Literal["list_tools"] = "list_tools"
    metadata: dict[str, Any] = Field(default_factory=dict)


class CallToolAction(_ClientFrame):
    """Calls a tool by name."""

    type: Literal["call_tool"] = "call_tool"
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


# Frames of the server. Fields that a later server adds are ignored.


class _ServerFrame(BaseModel):
    model_config = ConfigDict(extra="ignore")


class ObservationData(_ServerFrame):
    """What an environment says to a reset or a step.

    `reward` is a finite number or None. The metadata stands here, and in `observation` too.
    """

    observation: dict[str, Any]
    reward: StrictBool | Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    done: StrictBool = False
    metadata: dict[str, Any] | None = None


class ObservationFrame(_ServerFrame):
    """Answer to a reset and to a step."""

    type: Literal["observation"] = "observation"
    data: ObservationData


class StateData(_ServerFrame):
    """The state of a session; environments add fields of their own."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = 0


class ServedReward(_ServerFrame):
    """A reward that came after an episode's end; a later one has a larger number."""

    number: Annotated[int, Field(ge=1)]
    episode_id: Annotated[str, Field(max_length=MOST_EPISODE_ID)]
    reward: Annotated[float, Field(allow_inf_nan=False)]


class ServedRewards(_ServerFrame):
    """Answer to a question for the rewards after a number: the first of them, in order.

    Numbers are those of one `store`: a server that was started again may have another one.
    """

    store: Annotated[str, Field(max_length=100)] = ""
    rewards: list[ServedReward]


class StateReply(_ServerFrame):
    """Answer to a StateFrame."""

    type: Literal["state"] = "state"
    data: StateData


class ErrorData(_ServerFrame):
    """Why a frame was not served; `code` is an ErrorCode, or a word unknown here."""

    message: str = ""
    code: str
    errors: list[Any] = Field(default_factory=list)
    active_sessions: int | None = None
    max_sessions: int | None = None


class ErrorFrame(_ServerFrame):
    """Answer to a frame that was not served."""

    type: Literal["error"] = "error"
    data: ErrorData


class McpReply(_ServerFrame):
    """Answer to an McpFrame."""

    type: Literal["mcp"] = "mcp"
    data: dict[str, Any]


ServerFrame = Annotated[
    ObservationFrame | StateReply | ErrorFrame | McpReply, Field(discriminator="type")
]
SERVER_FRAME: TypeAdapter[ServerFrame] = fail_fast(ServerFrame)


# What an observation holds where the environment has tools.


class Tool(_ServerFrame):
    """A tool: its name, what it is for, and the JSON schema of its arguments."""

    name: str
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)


class ToolCallFailed(_ServerFrame):
    """Why a call did not reach its tool, or failed outside of it."""

    error_type: str
    message: str = ""


class CallToolObservation(_ServerFrame):
    """The result of a call."""

    tool_name: str = ""
    result: Any = None
    error: ToolCallFailed | None = None
