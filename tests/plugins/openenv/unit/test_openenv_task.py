"""Episodes of an environment behind a URL: actions, errors, rewards, splits and limits.

Also docs/openenv.md: its settings load, its options and bounds are those of the code.
"""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from guides import Guide, as_a_run
from openenv_server import CALLS, TEXT, OpenEnvServer, Socket

from composer_mesh.configs.load import resolve_config
from composer_mesh.plugins.openenv.client import connection, options, schemas, task, wire
from composer_mesh.plugins.openenv.client.errors import (
    ConnectionLost,
    EnvironmentRaised,
    ServerFull,
)
from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.rollouts.hints import HintTemplates, render_hint
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

SETTINGS = TaskSettings(call_s=30.0)
ACTION = {
    "type": "object",
    "description": "Moves on the board.",
    "properties": {
        "metadata": {"type": "object"},
        "move": {"$ref": "#/$defs/Move"},
        "times": {"type": "integer", "minimum": 1, "default": 1},
    },
    "required": ["move"],
    "$defs": {"Move": {"enum": ["UP", "DOWN"], "type": "string"}},
}


def made(server: OpenEnvServer, settings: TaskSettings = SETTINGS, **options: Any) -> OpenEnvTask:
    return OpenEnvTask.create(settings, url=server.url, **options)


def test_listed_tools_play_an_episode_to_the_environments_reward():
    with OpenEnvServer() as server:
        task = made(server)
        assert [one["function"]["name"] for one in task.tools] == ["add", "finish"]
        episode = task.episode("train", 0)
        goal = episode.payload["seed"] % 5 + 1
        with SyncSession(task, episode) as session:
            assert session.messages == [{"role": "user", "content": f"count to {goal}"}]
            step = session.step(call_text("add", {"number": goal}))
            assert step.messages[0]["content"] == f"the counter is {goal}"
            assert session.step(call_text("finish", {})).done
            outcome = session.outcome()
    assert (outcome.reward, outcome.success, outcome.rewards) == (1.0, True, {"environment": 1.0})
    assert server.resets[0]["seed"] == episode.payload["seed"]
    assert server.resets[0]["episode_id"]


def test_arguments_are_checked_before_they_are_sent():
    with OpenEnvServer() as server:
        task = made(server)
        with SyncSession(task, task.episode("train", 0)) as session:
            kinds = [
                session.step(call_text("add", arguments)).error.error_kind
                for arguments in ({}, {"number": "1"}, {"number": 10}, {"number": 1, "more": 2})
            ]
            assert session.step(call_text("subtract", {})).error.error_kind == "unknown_tool"
    assert kinds == ["missing_argument", "wrong_type", "bad_value", "unknown_argument"]


def test_an_error_that_the_metadata_tells_is_an_error_site_with_its_hint():
    template = {"below_zero": "The counter is {value}."}
    with OpenEnvServer() as server:
        task = made(server, hint_templates=template)
        with SyncSession(task, task.episode("train", 0)) as session:
            site = session.step(call_text("add", {"number": -1})).error
        general = made(server)
        with SyncSession(general, general.episode("train", 0)) as session:
            other = session.step(call_text("add", {"number": -1})).error
    assert site.error_kind == "below_zero"
    assert render_hint(site, templates=HintTemplates(template)) == "Hint: The counter is 0."
    assert render_hint(other) == "Hint: The call failed: the counter cannot go below zero"
    assert task.seen_error_kind


def test_a_text_is_the_action_and_rewards_are_summed():
    with OpenEnvServer(action=TEXT) as server:
        task = made(server, action="text", reward="summed", success_at=0.75, prompt="Count.")
        with SyncSession(task, task.episode("train", 0)) as session:
            assert session.messages[0]["content"].startswith("Count.\n\ncount to ")
            assert not session.step("a").done
            assert session.step("b").messages[0]["content"].startswith("2 of ")
            assert session.step("c").done
            outcome = session.outcome()
    assert (outcome.reward, outcome.success, task.tools) == (0.75, True, [])


def test_an_unfinished_episode_has_no_terminal_reward():
    with OpenEnvServer(action=TEXT) as server:
        task = made(server, action="text")
        with SyncSession(task, task.episode("train", 0)) as session:
            session.step("a")
            assert session.outcome().reward == 0.0


def test_the_actions_schema_becomes_one_tool():
    sent: list[dict[str, Any]] = []

    async def step(socket: Socket, data: dict[str, Any]) -> None:
        sent.append(data)
        socket.observe({"observation": {"x": 1, "note": "moved"}, "reward": 1.0, "done": True})

    with OpenEnvServer(action=ACTION, hooks={"step": step}) as server:
        task = made(server)
        (tool,) = task.tools
        assert tool["function"]["name"] == "act"
        assert tool["function"]["description"] == "Moves on the board."
        assert tool["function"]["parameters"]["properties"]["move"]["enum"] == ["UP", "DOWN"]
        assert "metadata" not in tool["function"]["parameters"]["properties"]
        with SyncSession(task, task.episode("train", 0)) as session:
            assert session.step(call_text("act", {"move": "LEFT"})).error.error_kind == "bad_value"
            assert session.step(call_text("act", {"move": "UP"})).done
    assert sent == [{"move": "UP"}]


def test_splits_are_those_of_the_task_api():
    with OpenEnvServer(splits={"train": 3, "test": 2}) as server:
        task = made(server)
        rows = [task.episode("train", index).payload for index in range(4)]
        assert [row["index"] for row in rows] == [0, 1, 2, 0]
        assert task.episode("heldout", 1).payload == {"split": "test", "index": 1}
        with SyncSession(task, task.episode("train", 2)):
            pass
    assert server.resets[0]["split"] == "train"
    assert server.resets[0]["index"] == 2


def test_one_split_is_divided_without_an_overlap():
    with OpenEnvServer(splits={"train": 11}) as server:
        task = made(server)
        train, heldout = task.rows("train"), task.rows("heldout")
        assert [row["index"] for row in heldout] == [4, 9]
        assert [row["index"] for row in train] == [0, 1, 2, 3, 5, 6, 7, 8, 10]


def test_a_split_that_is_not_there_is_refused():
    with (
        OpenEnvServer(splits={"train": 3}) as server,
        pytest.raises(UnusableTask, match="heldout_split is 'dev', but the environment's"),
    ):
        made(server, heldout_split="dev")
    with OpenEnvServer() as server, pytest.raises(UnusableTask, match="has no Task API"):
        made(server, train_split="train")


def test_a_full_server_is_waited_for_and_not_failed():
    with OpenEnvServer(capacity=1) as server:
        task = made(server)
        first = SyncSession(task, task.episode("train", 0))
        full = server.opened

        opened: list[SyncSession] = []
        second = threading.Thread(
            target=lambda: opened.append(SyncSession(task, task.episode("train", 1)))
        )
        second.start()
        while server.opened < full + 2:  # it was refused once, and asks again
            second.join(0.01)
        assert not opened
        first.close()
        second.join(30)
        assert len(opened) == 1


def test_a_server_that_stays_full_is_named_within_the_limit():
    with OpenEnvServer(capacity=1) as server:
        task = made(server, reset_s=27.5)  # which leaves a second to wait
        with (
            SyncSession(task, task.episode("train", 0)),
            pytest.raises(ServerFull, match=r"no free session in time, of 1 .*max_concurrent_envs"),
        ):
            SyncSession(task, task.episode("train", 1))


def test_nobody_listening_is_one_line():
    with OpenEnvServer() as server:
        url = server.url
    with pytest.raises(
        ConnectionLost, match=rf"{url}: cannot be queried .* start the server"
    ) as told:
        OpenEnvTask.create(SETTINGS, url=url)
    assert "\n" not in str(told.value)


def test_a_token_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENV_TOKEN", "s3cret")
    with OpenEnvServer(token="s3cret") as server:
        task = made(server, token_env="ENV_TOKEN")
        with SyncSession(task, task.episode("train", 0)):
            pass
        with pytest.raises(Exception, match="status 401") as told:
            made(server)
        monkeypatch.setenv("ENV_TOKEN", "wrong")
        with pytest.raises(Exception, match="status 401") as other:
            made(server, token_env="ENV_TOKEN")
    said = f"{told.value!r}{other.value!r}{task.options!r}"
    assert "s3cret" not in said
    assert "wrong" not in said
    monkeypatch.delenv("ENV_TOKEN")
    with pytest.raises(UnusableTask, match="token_env is 'ENV_TOKEN', but that variable is not"):
        OpenEnvTask.create(SETTINGS, url="http://127.0.0.1:1", token_env="ENV_TOKEN")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "ftp://x"}, "data.options.url: .*http://"),
        ({"url": "http://a:b@x"}, "no user, password"),
        ({"url": "http://example.org", "token_env": "T"}, "unencrypted"),
        ({"url": "http://127.0.0.1:1", "rewards": "sum"}, "data.options.rewards: .*use one of url"),
        ({"url": "http://127.0.0.1:1", "step_s": 29.0}, "raise environment.call_s or lower step_s"),
        ({}, "data.options.url: Field required"),
    ],
)
def test_options_are_refused_with_their_key_and_the_repair(options: dict[str, Any], said: str):
    with pytest.raises(UnusableTask, match=said):
        OpenEnvTask.create(SETTINGS, **options)


def test_an_exception_of_the_environment_ends_the_attempt_unless_options_tell_it():
    async def step(socket: Socket, _data: dict[str, Any]) -> None:
        socket.error("EXECUTION_ERROR", "illegal move")

    with OpenEnvServer(hooks={"step": step}) as server:
        task = made(server)
        with (
            SyncSession(task, task.episode("train", 0)) as session,
            pytest.raises(EnvironmentRaised, match="illegal move"),
        ):
            session.step(call_text("finish", {}))
        task = made(server, step_errors="tell")
        with SyncSession(task, task.episode("train", 0)) as session:
            site = session.step(call_text("finish", {})).error
    assert (site.error_kind, site.data["text"]) == ("step_failed", "illegal move")


def test_an_action_that_the_server_refuses_is_the_agents_error():
    async def step(socket: Socket, _data: dict[str, Any]) -> None:
        socket.error("VALIDATION_ERROR", "Invalid message", errors=[{"msg": "too far"}])

    with OpenEnvServer(hooks={"step": step}) as server:
        task = made(server)
        with SyncSession(task, task.episode("train", 0)) as session:
            site = session.step(call_text("finish", {})).error
    assert (site.error_kind, site.data["text"]) == ("invalid_action", "Invalid message too far")


def test_check_says_what_the_environment_offers():
    with OpenEnvServer(states=True) as server:
        lines = made(server).remarks()
        assert "2 tools" in lines[0]
        assert "a quarter is held out" in lines[1]
        assert "states are reported by the server" in lines[2]
    with OpenEnvServer(splits={"train": 10}) as server:
        lines = made(server).remarks()
        assert "8 training tasks of split 'train', 2 held-out ones" in lines[1]
        assert "states are the conversation" in lines[2]
        assert "no answer of the dry episode had an error_kind" in lines[2]


def test_calls_of_tools_are_recognized_by_the_actions_schema():
    with OpenEnvServer(action={"type": "object", "properties": {"metadata": {}}}) as server:
        assert made(server).kind == "tools"
    with OpenEnvServer(action=CALLS) as server:
        assert made(server).kind == "tools"
    with OpenEnvServer(action=TEXT) as server:
        assert made(server).kind == "schema"


def test_an_environment_is_part_of_a_mixture():
    with OpenEnvServer() as server, OpenEnvServer(splits={"train": 5}) as other:
        table = [
            {"task": "openenv", "options": {"url": server.url}},
            {"task": "openenv", "options": {"url": other.url, "name": "counted"}},
            {"task": "toolbox"},
        ]
        config = resolve_config(
            {"run": {"name": "mixed", "steps": 1}, "data": {"mixture": table}}, [], "mixed"
        )
        mixture = make_task(config)
        names = [mixture.pick("train", index).task for index in range(3)]
        episode = mixture.episode("train", names.index("counted"))
        with SyncSession(mixture, episode) as session:
            assert session.step(call_text("finish", {})).done
            assert session.outcome().reward == 0.0
    assert sorted(names) == ["counted", "openenv", "toolbox"]
    assert other.resets[0]["split"] == "train"


def test_a_session_of_a_lost_event_loop_is_lost_and_not_waited_for():
    with OpenEnvServer() as server:
        task = made(server)
        running = RunningEpisode(task, task.episode("train", 0))
        with asyncio.Runner() as runner:
            runner.run(running.begin())
            with asyncio.Runner() as other, pytest.raises(ConnectionLost, match="event loop"):
                other.run(running.step(call_text("finish", {})))
            runner.run(running.close())


def test_a_conversation_without_a_session_has_no_reward_of_an_environment():
    with OpenEnvServer() as server:
        task = made(server)
        scored = RunningEpisode(task, task.episode("train", 0)).outcome([])
        with pytest.raises(UnusableTask, match="scores its own episodes alone"):
            asyncio.run(scored)


def test_an_environment_takes_no_file_of_rows(tmp_path: Path):
    with pytest.raises(UnusableTask, match=r"data\.path is set"):
        OpenEnvTask.create(TaskSettings(path=tmp_path), url="http://127.0.0.1:1")


PAGE = Guide.read("openenv.md")


def test_the_settings_make_the_task() -> None:
    with OpenEnvServer() as server:
        text = PAGE.blocks("toml")[0].replace("http://127.0.0.1:8000", server.url)
        made = make_task(as_a_run(text))
    assert isinstance(made, OpenEnvTask)
    assert made.name == "openenv"


def test_the_table_of_options_is_whole() -> None:
    table = PAGE.text.partition("| `data.options` | meaning |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(options.OpenEnvOptions.model_fields)


@pytest.mark.parametrize(
    "said",
    [
        f'`name` | name of the task in traces and metrics; `"{OpenEnvTask.name}"`',
        f"{schemas.MOST_TOOLS} tools, each with at most {schemas.MOST_NODES:,} schemas",
        f"Descriptions have at most {schemas.LONGEST_TEXT:,} characters",
        f"after {connection.FIRST_WAIT_S:g} to {connection.LONGEST_WAIT_S:g} s",
        f"`reset_s` is {task.RESET_SHARE:g} and `step_s` {task.STEP_SHARE:g} of it",
        f"{task.MOST_SHARE:g} of it minus `reset_s`",
        f"`metadata.{wire.TURN}`",
        *(f"| `{key}` |" for key in (wire.ERROR_KIND, wire.HINT_TEMPLATE_KEY, wire.ERROR_FACTS)),
    ],
)
def test_the_bounds_and_names_are_those_of_the_code(said: str) -> None:
    assert said in PAGE.text
