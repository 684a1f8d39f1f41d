"""A session without sockets: episodes one after another, error sites, states, task faults."""

import json
from pathlib import Path

import pytest
from served_tasks import SECRET, SYSTEM, Count, Counting, call, pool_of

from composer_mesh.plugins.openenv.client.wire import ErrorCode, ObservationData, StateData
from composer_mesh.plugins.openenv.server.session import EnvSession
from composer_mesh.plugins.openenv.server.validation import SessionRequestRefused
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.task_loop import TaskRunner


def session_of(limit_s: float = 30.0, **settings: int) -> EnvSession:
    return EnvSession(TaskRunner(Count.create(TaskSettings(**settings)), limit_s))


async def test_the_same_reset_begins_the_same_episode() -> None:
    first, second = session_of(), session_of()
    asked = {"split": "heldout", "index": 5, "episode_id": "mine", "unknown": [1]}
    one, two = await first.reset(asked), await second.reset(asked)
    assert one == two
    assert ObservationData.model_validate(one).done is False
    assert one["metadata"]["episode_id"] == "mine"
    assert one["observation"]["text"].startswith("Count.\nCount to ")


async def test_the_last_step_alone_has_a_reward() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    step = await session.step(call("add", by=3))
    assert (step["reward"], step["done"]) == (None, False)
    assert step["observation"]["result"]["data"] == "count 3"
    last = await session.step({"message": "done"})
    assert (last["reward"], last["done"]) == (3.0, True)
    assert last["metadata"]["rewards"] == {"counted": 3.0}


async def test_a_client_that_knows_tools_alone_can_answer() -> None:
    session = session_of()
    assert session.tools[-1]["name"] == "answer"
    await session.reset({"seed": 1})
    for wrong in ({}, {"text": 3}, {"text": "a", "more": 1}):
        with pytest.raises(SessionRequestRefused, match="one text"):
            await session.step(call("answer", **wrong))
    last = await session.step(call("answer", text="done"))
    assert (last["reward"], last["done"]) == (0.0, True)


async def test_a_tool_and_a_finish_end_an_episode_with_its_reward() -> None:
    session = session_of()
    for action in (call("stop"), {"type": "finish"}):
        await session.reset({"seed": 1})
        await session.step(call("add", by=2))
        last = await session.step(action)
        assert (last["reward"], last["done"]) == (2.0, True)


async def test_a_step_after_the_end_is_refused_and_a_reset_begins_anew() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    await session.step({"message": "done"})
    for action in ({"message": "again"}, call("add", by=1), {"type": "finish"}):
        with pytest.raises(SessionRequestRefused, match="has ended") as refused:
            await session.step(action)
        assert refused.value.code is ErrorCode.VALIDATION_ERROR
    await session.reset({"seed": 1})
    assert (await session.step(call("add", by=1)))["done"] is False


async def test_an_error_site_has_its_kind_its_hint_and_its_facts() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    wrong = await session.step(call("add", by=-2))
    site = {name: wrong["metadata"][name] for name in ("error_kind", "hint_template_key")}
    assert site == {"error_kind": "negative", "hint_template_key": "negative"}
    assert wrong["metadata"]["error_facts"] == {"by": "-2"}
    assert wrong["observation"]["result"]["is_error"] is True
    assert wrong["observation"]["error"] is None, "a tool's own error is in its result"
    right = await session.step(call("add", by=2))
    assert right["metadata"]["error_kind"] == "none"


@pytest.mark.parametrize(
    ("action", "kind"),
    [(call("add", by="x"), "invalid_args"), (call("nothing"), "tool_not_found")],
)
async def test_a_call_that_reaches_no_tool_has_an_error_of_openenv(
    action: dict[str, object], kind: str
) -> None:
    session = session_of()
    await session.reset({"seed": 1})
    assert (await session.step(action))["observation"]["error"]["error_type"] == kind


async def test_a_state_is_what_the_agent_had_read_when_it_acted_at_that_turn() -> None:
    session = session_of()
    opening = await session.reset({"seed": 1})
    await session.step(call("add", by=3))
    await session.step({"message": "done"})
    first = session.state(0)["messages"]
    assert first[0] == SYSTEM
    assert opening["observation"]["text"] == "\n".join(one["content"] for one in first)
    second = session.state(1)
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["turn"] == 1
    assert StateData.model_validate(session.state()).step_count == 2
    with pytest.raises(SessionRequestRefused, match="turn 2"):
        session.state(2)


async def test_a_fault_of_the_task_is_never_a_reward_and_ends_the_episode_alone() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    with pytest.raises(SessionRequestRefused, match="KeyError") as refused:
        await session.step(call("fail"))
    assert refused.value.code is ErrorCode.EXECUTION_ERROR
    for action in (call("add", by=1), {"type": "finish"}):
        with pytest.raises(SessionRequestRefused, match="has failed: reset") as refused:
            await session.step(action)
        assert refused.value.code is ErrorCode.EXECUTION_ERROR
    await session.reset({"seed": 1})
    assert (await session.step(call("add", by=1)))["observation"]["text"] == "count 1"


async def test_the_log_keeps_an_id_of_a_client_on_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = session_of()
    await session.reset({"seed": 1, "episode_id": "mine\nERROR forged"})
    with pytest.raises(SessionRequestRefused):
        await session.step(call("fail"))
    (told,) = [record.getMessage() for record in caplog.records if "episode" in record.getMessage()]
    assert "'mine\\nERROR forged'" in told


async def test_a_tool_that_never_returns_is_an_error_site() -> None:
    session = session_of(limit_s=0.2)
    await session.reset({"seed": 1})
    try:
        late = await session.step(call("hang"))
    finally:
        Counting.never.set()
    assert late["metadata"]["error_kind"] == "tool_timeout"
    assert late["observation"]["error"]["error_type"] == "timeout"


async def test_neither_a_row_nor_its_answer_nor_the_text_of_a_fault_is_told() -> None:
    session = session_of()
    said = [await session.reset({"seed": 1}), await session.step(call("add", by=-1))]
    said += [session.state(), session.state(1), await session.step({"message": "done"})]
    await session.reset({"seed": 1})
    with pytest.raises(SessionRequestRefused) as refused:
        await session.step(call("fail"))
    said += [refused.value.data]
    assert SECRET not in json.dumps(said)


@pytest.mark.parametrize(
    "action",
    [
        *({}, {"type": "jump"}, {"type": 3}, {"message": 3}, {"message": "a", "more": 1}),
        *({"type": "call_tool"}, {"type": "call_tool", "tool_name": "add", "arguments": []}),
    ],
)
async def test_what_is_no_action_is_refused_and_no_turn(action: dict[str, object]) -> None:
    session = session_of()
    await session.reset({"seed": 1})
    with pytest.raises(SessionRequestRefused) as refused:
        await session.step(action)
    assert refused.value.code is ErrorCode.VALIDATION_ERROR
    assert session.state()["step_count"] == 0


async def test_a_reset_closes_the_episode_before() -> None:
    session = session_of()
    await session.reset({"index": 501})
    await session.reset({"index": 502})
    assert 501 in Counting.closed
    assert 502 not in Counting.closed
    await session.close()
    assert 502 in Counting.closed


class FailingClose(Counting):
    """Its episodes cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("the database is gone")


class CountFailingClose(Count):
    """Count with sessions that fail at their end."""

    session_class = FailingClose


async def test_a_session_whose_close_fails_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, CountFailingClose.create(), most=1)
    for _ in range(2):
        async with pool.session() as session:
            await session.reset({"seed": 1})
