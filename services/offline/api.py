"""Python API of offline teacher replay: states or traces to teacher replies or training rows.

    replies = await replay_trace(states, teachers, max_total_usd=2.0)
    rows = extract_dpo_pairs(states, replies, agreement_threshold=2)
    rows = await replay_and_normalize_trace("runs/quickstart", max_total_usd=2.0)

It shares its parts with training runs and `composer-mesh replay`, and needs no mesh. Without a
`folder` the spending limit applies to one call and nothing is stored; with one, requests that were
paid for are not paid again.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ParamSpec, TypeVar

import httpx
from pydantic import ValidationError

from composer_mesh.actors.panel.configured import CACHE_FILE
from composer_mesh.actors.panel.panel import content_key
from composer_mesh.configs.schema import Config
from composer_mesh.configs.teachers import TeacherConfig
from composer_mesh.configs.validation import fail_fast, place_and_text
from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.consensus import decide
from composer_mesh.rollouts.pairs import (
    FrozenState,
    PreferencePair,
    StudentState,
    TeacherReply,
    pair_record,
)
from composer_mesh.rollouts.tool_calls import message_text
from composer_mesh.rollouts.traces import Message, Trace
from composer_mesh.services.offline.config import offline_config, openrouter_teacher
from composer_mesh.services.offline.job import OfflineJob
from composer_mesh.services.offline.options import CONCURRENCY, ReplayRefused
from composer_mesh.services.offline.session import TeacherClient, opened_panel, refuse_builtin
from composer_mesh.services.offline.traces import TraceIndex, index_of, index_traces
from composer_mesh.tasks.loading import make_task

__all__ = [
    "ReplayRefused",
    "chat_state",
    "extract_dpo_pairs",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
    "replay_trace",
]

P = ParamSpec("P")
T = TypeVar("T")
Teacher = TeacherConfig | Mapping[str, Any] | str
"""A teacher's config, the equivalent table, or an OpenRouter model id."""

Tools = Sequence[dict[str, Any]]
NO_TRACES = TraceIndex(None, task="toolbox")
EXAMPLE = '[{"role": "user", "content": "Hello"}]'
_CHAT = fail_fast(list[Message])


def chat_state(state_id: str, messages: Sequence[Message], action: str | Message) -> StudentState:
    """Create a state from a chat: the messages before an assistant turn, and the turn's action.

    Raises UnusableMessages for messages or an action that are not those of a chat.
    """
    frozen = frozen_state(messages, state_id)
    (said,) = ({"content": action},) if isinstance(action, str) else _messages([action], "action")
    try:
        text = message_text(said)
    except ValueError as error:
        raise UnusableMessages(f"action: {error}") from None
    return StudentState(frozen, state_id, 0, text, [], [], 0)


def frozen_state(messages: Sequence[Message], state_id: str = "") -> FrozenState:
    """Return the state of a teacher's input; without an id it has that of its messages.

    Raises UnusableMessages for messages that are not those of a chat.
    """
    if not isinstance(state_id, str):
        raise UnusableMessages(f"state_id is {state_id!r} but must be a text: pass a str")
    chat = _messages(messages, "messages")
    state_id = state_id or content_key(chat)
    seed = int.from_bytes(hashlib.sha256(state_id.encode()).digest()[:4]) >> 1
    return FrozenState(state_id, chat, seed)


def _messages(given: Any, name: str) -> list[Message]:
    """Return the messages of a chat; raise UnusableMessages."""
    try:
        chat: list[Message] = _CHAT.validate_python(given)
    except ValidationError as error:
        raise UnusableMessages(
            f"{name} must be messages of a chat, such as {EXAMPLE}: {place_and_text(error)}"
        ) from None
    if not chat:
        raise UnusableMessages(f"{name} is empty: pass one message or more, such as {EXAMPLE}")
    return chat


async def replay_trace(
    states: Sequence[StudentState | FrozenState],
    teachers: Sequence[Teacher],
    max_total_usd: float = 0.0,
    *,
    n: int | None = None,
    tools: Tools = (),
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    concurrency: int = CONCURRENCY,
    environ: Mapping[str, str] = os.environ,
    transport: httpx.AsyncBaseTransport | None = None,
) -> dict[str, list[TeacherReply]]:
    """Query `n` of the teachers, or all, about each state; return replies by `state_id`.

    Waits until every teacher has answered or failed. A failure is a value among the replies, also
    if a query would exceed the spending limit. Raises `ReplayRefused` or `ConfigError` for errors
    that affect every query. Teachers of kind "builtin" need traces of a run: see
    `replay_and_normalize_trace`.
    """
    config = query_config(teachers, overrides, max_total_usd)
    frozen = [state.state if isinstance(state, StudentState) else state for state in states]
    _refuse_repeated([state.state_id for state in frozen])
    count = len(config.replay.teachers) if n is None else n
    if not 1 <= count <= len(config.replay.teachers):
        raise ReplayRefused(
            f"n is {n}, but there are {len(teachers)} teachers: query 1 to that many"
        )
    with kept_in(folder) as place:
        async with opened_panel(
            config,
            None,
            place,
            tools=tools,
            answers=place / CACHE_FILE,
            environ=environ,
            transport=transport,
        ) as panel:
            teacher_client = TeacherClient(panel, concurrency)
            async with asyncio.TaskGroup() as asking:
                tasks = {
                    state.state_id: asking.create_task(teacher_client.query(state, count))
                    for state in frozen
                }
    return {state_id: task.result() for state_id, task in tasks.items()}


def extract_dpo_pairs(
    states: Sequence[StudentState],
    teacher_actions: Mapping[str, Sequence[TeacherReply]],
    agreement_threshold: int = 2,
    tools: Tools = (),
) -> list[dict[str, Any]]:
    """Return one row for each state whose teachers disagree with the student, in state order.

    A row has `state_id`, `state_messages` (chat messages), `chosen` and `rejected` (lists of one
    chat message, with `prompt` in TRL's format), `n_teachers_agreeing`, and its origin.
    """
    rows = []
    for state in states:
        if (state_id := state.state.state_id) not in teacher_actions:
            raise ValueError(
                f"teacher_actions has nothing for state {state_id!r}: pass what replay_trace "
                "returned for the same states"
            )
        decision = decide(state, teacher_actions[state_id], agreement_threshold)
        if decision.pair is not None:
            rows.append(_row(decision.pair, tools))
    return rows


async def replay_and_normalize_trace(
    traces: Path | str | Trace | Sequence[Trace],
    teachers: Sequence[Teacher] | str | None = None,
    max_total_usd: float | None = None,
    *,
    overrides: Sequence[str] = (),
    tools: Tools | None = None,
    limit: int | None = None,
    folder: Path | None = None,
    concurrency: int = CONCURRENCY,
    environ: Mapping[str, str] = os.environ,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[dict[str, Any]]:
    """Convert traces to rows in one call: select states, query teachers, vote, filter.

    `traces` is a run directory, a file, or traces in memory; `teachers` None uses the run's own, a
    string is parsed as by `--teachers`; `overrides` are `replay.agreement_threshold=3` and the
    like. `tools` defaults to those of the traces' task. Rows are those of `extract_dpo_pairs`.
    Waits for all answers; raises as `replay_trace`.
    """
    source = _source(traces, has_tools=tools is not None)
    named = teachers if teachers is None or isinstance(teachers, str) else _tables(teachers)
    config = offline_config(source, named, overrides, max_total_usd)
    needed = tools is None or config.replay.has_builtin_teachers
    task = make_task(config) if needed else None
    tools = task.tools if task is not None and tools is None else list(tools or ())
    with kept_in(folder) as place:
        async with opened_panel(
            config,
            task,
            place,
            tools=tools,
            answers=place / CACHE_FILE,
            environ=environ,
            transport=transport,
        ) as panel:
            teacher_client = TeacherClient(panel, concurrency)
            job = await asyncio.to_thread(OfflineJob, config, teacher_client, concurrency)
            await job.run(source.groups(), limit)
    return [_row(pair, tools) for pair in job.pairs]


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
    """Run the coroutine of a function; raises RuntimeError where an event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    raise RuntimeError(
        f"{name}_sync was called while an event loop runs in this thread, as in a notebook: write "
        f"`await {name}(…)` instead"
    )


def _synchronous(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(lambda: function(*args, **kwargs), function.__name__)

    return call


replay_and_normalize_trace_sync = _synchronous(replay_and_normalize_trace)
"""`replay_and_normalize_trace` for code without an event loop."""


def _source(traces: Path | str | Trace | Sequence[Trace], has_tools: bool) -> TraceIndex:
    if isinstance(traces, (str, Path)):
        return index_traces(Path(traces))
    listed = [traces] if isinstance(traces, Trace) else list(traces)
    if not listed:
        raise ReplayRefused("traces is empty: pass one trace or more")
    _refuse_repeated([trace.trace_id for trace in listed])
    # Tasks of other frameworks are unknown, and not needed if their tools are given.
    return index_of(listed, "toolbox" if has_tools else listed[0].task)


def in_memory_config(
    teachers: Sequence[Teacher], overrides: Sequence[str], max_total_usd: float
) -> Config:
    """Return the config of a job on traces in memory that makes pairs."""
    return offline_config(NO_TRACES, _tables(teachers), overrides, max_total_usd)


def query_config(teachers: Sequence[Teacher], overrides: Sequence[str], usd: float) -> Config:
    """Return the config of a job without traces; raise ReplayRefused for a builtin teacher."""
    config = offline_config(NO_TRACES, _tables(teachers), overrides, usd, makes_pairs=False)
    refuse_builtin(config)
    return config


def _tables(teachers: Sequence[Teacher]) -> list[dict[str, Any]]:
    return [_table(teacher) for teacher in teachers]


def _table(teacher: Teacher) -> dict[str, Any]:
    if isinstance(teacher, str):
        return openrouter_teacher(teacher)
    if isinstance(teacher, TeacherConfig):
        return teacher.model_dump(mode="json", exclude_none=True)
    return dict(teacher)


def _row(pair: PreferencePair, tools: Tools) -> dict[str, Any]:
    """Return a row as in the output file, except that `state_messages` is not serialized."""
    return {**pair_record(pair, tools), "state_messages": pair.messages}


def _refuse_repeated(ids: Sequence[str]) -> None:
    if len(set(ids)) < len(ids):
        repeated = next(one for one in ids if ids.count(one) > 1)
        raise ReplayRefused(f"id {repeated!r} is there more than once: give each its own")


@contextmanager
def kept_in(folder: Path | None) -> Iterator[Path]:
    """Yield the folder, or one that is deleted afterwards."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="composer-mesh-") as place:
        yield Path(place)
