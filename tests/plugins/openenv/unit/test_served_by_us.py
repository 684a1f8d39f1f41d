"""Episodes of a task that `serve-env` offers: through the wire as natively."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from served_tasks import Count, served_beside

from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.rollouts.tasks import Episode, Outcome
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task, TaskSettings

INDEX = 3
SETTINGS = TaskSettings(hint_templates={"negative": "Add no {by}."})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, build_config: Any) -> Iterator[OpenEnvTask]:
    config = build_config(
        data={"task": "served_tasks:Count"}, environment={"tool_error_penalty": 0.0}
    )
    with served_beside(tmp_path_factory.mktemp("served"), config) as url:
        yield OpenEnvTask.create(SETTINGS, url=url)


def test_an_error_costs_in_the_served_config_or_in_that_of_the_run_and_never_in_both(
    task: OpenEnvTask, tmp_path: Any, build_config: Any
) -> None:
    url = task.options.url
    costly = TaskSettings(tool_error_penalty=0.2)
    assert OpenEnvTask.create(costly, url=url).settings.tool_error_penalty == 0.2
    config = build_config(
        data={"task": "served_tasks:Count"}, environment={"tool_error_penalty": 0.1}
    )
    with served_beside(tmp_path, config) as other:
        assert OpenEnvTask.create(SETTINGS, url=other).settings.tool_error_penalty == 0.0
        with pytest.raises(UnusableTask, match=r"is 0\.2 here, .* takes 0\.1 for each error"):
            OpenEnvTask.create(costly, url=other)


async def played(task: Task, episode: Episode, *actions: str) -> tuple[RunningEpisode, Outcome]:
    running = RunningEpisode(task, episode)
    await running.begin()
    try:
        for action in actions:
            await running.step(action)
        return running, await running.outcome()
    finally:
        await running.close()


def sites(running: RunningEpisode) -> list[ErrorSite]:
    """Its error sites, without the text among the facts, which only the wire has there."""
    return [
        replace(site, data={name: one for name, one in site.data.items() if name != "text"})
        for site in running._errors
    ]


def texts(messages: list[Message]) -> list[str]:
    """What was said after the first messages; arguments are checked here in words of its own."""
    said = [str(one["content"]) for one in messages if one["role"] != "system"][1:]
    return [one.replace("a whole number", "a number") for one in said]


@pytest.mark.parametrize(
    "actions",
    [
        ["the answer"],
        [call_text("add", {"by": 2}), "the answer"],
        [call_text("add", {"by": -1}), call_text("add", {"by": 4}), "the answer"],
        [call_text("add", {"by": 2}), call_text("stop", {})],
        [call_text("add", {"by": 2})],
        [call_text("nothing", {}), call_text("add", {"by": 3}), "the answer"],
        [call_text("add", {"by": "x"}), call_text("add", {"by": 3}), "the answer"],
        ["<tool_call>\n{\n</tool_call>", call_text("add", {"by": 5}), "the answer"],
    ],
    ids=["answer", "call", "error", "ended", "unfinished", "unknown", "wrong type", "malformed"],
)
async def test_an_episode_through_the_wire_is_the_native_one(task: Task, actions: list[str]):
    native = Count.create(SETTINGS)
    at_home, expected = await played(native, native.episode("train", INDEX), *actions)
    away, found = await played(
        task, Episode(task.name, "train", 0, {"split": "train", "index": INDEX}), *actions
    )
    assert found.reward == expected.reward
    assert texts(found.messages) == texts(expected.messages)
    assert [(one.error_kind, one.hint_template_key) for one in sites(away)] == [
        (one.error_kind, one.hint_template_key) for one in sites(at_home)
    ]
    told = [one.data for one in sites(away) if one.error_kind == "negative"]
    assert told == [one.data for one in sites(at_home) if one.error_kind == "negative"]
