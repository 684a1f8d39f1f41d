"""OpenEnv servers that answer with broken frames, schemas and observations."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from openenv_server import CALLS, TOOLS, Json, OpenEnvServer, Socket

from composer_mesh.plugins.openenv.client.options import read_options
from composer_mesh.plugins.openenv.client.schemas import SchemaToolSpec
from composer_mesh.plugins.openenv.client.session import (
    OpenEnvSession,
    UnreadableObservation,
    reported_error,
    text_of,
)
from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.plugins.openenv.client.wire import ObservationData
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import TaskError, ToolError, UnusableTask
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

Cases = Callable[[int], Iterator[int]]
VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        10**40,
        1e308,
        float("nan"),
        float("-inf"),
        "",
        "x",
        "\ud800",
        "<|im_end|>",
    ),
    *([], {}, [[]], {"a": {}}, "none", "type", ["type"], {"$ref": "#"}, {"$ref": "#/$defs/a"}),
]
KEYS = [
    *("type", "data", "observation", "reward", "done", "metadata", "error_kind", "result", "error"),
    *("content", "is_error", "properties", "required", "$ref", "$defs", "anyOf", "items", "enum"),
    *("hint_template_key", "error_facts", "minimum", "maxLength", "additionalProperties", "const"),
]


def broken(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value in which something was changed."""
    whole = deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = list(containers(whole))
        if not places:
            return rng.choice(VALUES)
        place = rng.choice(places)
        if isinstance(place, list):
            place.insert(rng.randint(0, len(place)), deepcopy(rng.choice(VALUES)))
        elif place and rng.random() < 0.7:
            name = rng.choice(sorted(place))
            place[name] = deepcopy(rng.choice(VALUES))
        else:
            place[rng.choice(KEYS)] = deepcopy(rng.choice(VALUES))
    return whole


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from containers(one)


def spoilt(rng: random.Random, text: str) -> str:
    """Return a text with a part cut out, doubled or replaced."""
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.randint(0, 20))
    middle = rng.choice(["", text[start:end] * 2, "[" * 300, "1" * 5000, '"', "\x00", "\\ud800"])
    return text[:start] + middle + text[end:]


def test_every_broken_answer_is_an_observation_or_a_named_error(cases: Cases):
    """One server plays all cases; a session that fails is closed, and the next one is new."""
    rng = random.Random()

    async def step(socket: Socket, data: Json) -> None:
        answer = {"type": "observation", "data": socket.counter.step(data)}
        text = json.dumps(broken(rng, answer) if rng.random() < 0.7 else answer)
        socket.send_text(spoilt(rng, text) if rng.random() < 0.4 else text)

    with OpenEnvServer(hooks={"step": step}) as server:
        task = OpenEnvTask.create(TaskSettings(call_s=30.0), url=server.url)
        for seed in cases(150):
            rng.seed(seed)
            asyncio.run(played(task, rng, seed))


async def played(task: OpenEnvTask, rng: random.Random, seed: int) -> None:
    """Play up to four actions; a reward must be one that the environment can give."""
    running = RunningEpisode(task, task.episode("train", seed))
    await running.begin()
    try:
        reward, said = await rewarded(running, rng), ""
    except TaskError as error:
        reward, said = 0.0, str(error)
    finally:
        await running.close()
    assert abs(reward) <= task.options.most_reward, seed
    assert "\n" not in said, seed
    assert len(said) < 1500, seed


async def rewarded(running: RunningEpisode, rng: random.Random) -> float:
    done, turns = False, 0
    while not done and turns < 4:
        name = rng.choice(["add", "finish"])
        arguments = {"number": rng.randint(-3, 9)} if name == "add" else {}
        step = await running.step(call_text(name, arguments))
        if step.error is not None:
            assert render_hint(step.error)
        done, turns = step.done, turns + 1
    return (await running.outcome()).reward


def test_every_broken_schema_is_a_bounded_tool_or_refused(cases: Cases):
    good = {**CALLS, "$defs": {"a": {"type": "string"}}, "anyOf": [{"minProperties": 1}]}
    for seed in cases(1500):
        rng = random.Random(seed)
        schema = broken(rng, rng.choice([good, TOOLS[0]["input_schema"]]))
        if not isinstance(schema, dict):
            continue
        try:
            spec = SchemaToolSpec("go", "Goes.", schema, OpenEnvSession.call_tool)
        except UnusableTask:
            continue
        assert len(json.dumps(spec.schema)) < 100_000, seed
        for arguments in ({}, {"number": 1}, {"tool_name": "x", "arguments": {}}):
            assert refused_as(spec, arguments) in (None, *TEMPLATES), seed


def refused_as(spec: SchemaToolSpec, arguments: dict[str, Any]) -> str | None:
    """Return the error kind of a call that is refused."""
    try:
        spec.checked(arguments)
    except ToolError as refused:
        return refused.kind
    return None


def test_every_broken_observation_is_read_or_refused(cases: Cases):
    good = {
        "message": "hi",
        "metadata": {"error_kind": "wrong_type", "error_facts": {"tool": "add"}},
    }
    for seed in cases(2000):
        said = broken(random.Random(seed), good)
        if not isinstance(said, dict):
            continue
        data = ObservationData(observation=said)
        try:
            assert isinstance(text_of(data, None), str)
        except UnreadableObservation:
            continue
        error = reported_error(data, TEMPLATES)
        if error is not None and error.hint != "tool_error":
            assert TEMPLATES[error.hint].format_map(error.facts)


def test_every_broken_option_is_refused_with_its_key_or_taken(cases: Cases):
    good = {"url": "http://127.0.0.1:8000", "reward": "summed", "reset": {"a": 1}, "step_s": 1.0}
    for seed in cases(1000):
        options = broken(random.Random(seed), good)
        if not isinstance(options, dict):
            continue
        assert taken_or_told(options).startswith(("http", "data.options")), seed


def taken_or_told(options: dict[str, Any]) -> str:
    """Return the address of options, or why they are refused."""
    try:
        return read_options(options).url
    except UnusableTask as error:
        return str(error)
