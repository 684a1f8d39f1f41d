"""Single calls of BFCL on rows of our own: the split, the comparison of calls, gold and hints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from composer_mesh.plugins.task_packages.bfcl.single_call import (
    BfclSingleCall,
    difference,
    part_of,
)
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import SyncSession

DOCUMENT: dict[str, Any] = {
    "type": "dict",
    "properties": {
        "city": {"type": "string", "description": "Name of the city."},
        "days": {"type": "integer", "description": "Days from today."},
        "limit": {"type": "float", "description": "Upper bound."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Labels."},
        "place": {"type": "dict", "description": "Where it is."},
        "exact": {"type": "boolean", "description": "Whether it is exact."},
    },
    "required": ["city"],
}
ANSWERS: dict[str, list[Any]] = {
    "city": ["New York", "NYC"],
    "days": [1],
    "limit": [2.0, ""],
    "tags": [["a b", "c"], ""],
    "place": [{"street": ["Main St."], "number": [5, ""]}, ""],
    "exact": ["", True],
}
RIGHT = {"city": "New York", "days": 1}


def _function(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "parameters": DOCUMENT}


class _Rows:
    """Thirty rows, each with a function of its own beside a common one."""

    names = tuple(f"weather.of_{number}" for number in range(30))

    def single_turns(self, category: str) -> list[dict[str, Any]]:
        return [
            {
                "id": f"{category}_{number}",
                "question": [[{"role": "user", "content": f"{category} {number}?"}]],
                "function": [_function(name), _function("common")],
            }
            for number, name in enumerate(self.names)
        ]

    def answers(self, category: str) -> dict[str, list[Any]]:
        return {f"{category}_{n}": [{name: ANSWERS}] for n, name in enumerate(self.names)}


class _Task(BfclSingleCall):
    name = "single"
    source: Any = _Rows()


@pytest.mark.parametrize(
    "arguments",
    [
        RIGHT,
        {"city": "new-york", "days": 1},
        {"city": "NYC", "days": 1, "limit": 2},
        {**RIGHT, "tags": ["A B.", "c"], "exact": True},
        {**RIGHT, "place": {"street": "main st"}},
        {**RIGHT, "place": {"street": "Main St.", "number": 5}},
    ],
)
def test_calls_with_possible_values_are_right(arguments: dict[str, Any]) -> None:
    assert difference(arguments, ANSWERS, DOCUMENT) is None


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"days": 1}, ("missing_argument", "city")),
        ({"city": "NYC"}, ("missing_argument", "days")),
        ({**RIGHT, "more": 1}, ("unknown_argument", "more")),
        ({**RIGHT, "days": 1.0}, ("wrong_value", "days")),
        ({**RIGHT, "days": True}, ("wrong_value", "days")),
        ({**RIGHT, "days": "1"}, ("wrong_value", "days")),
        ({**RIGHT, "limit": 3}, ("wrong_value", "limit")),
        ({**RIGHT, "tags": ["c", "a b"]}, ("wrong_value", "tags")),
        ({**RIGHT, "tags": "a b"}, ("wrong_value", "tags")),
        ({**RIGHT, "exact": 1}, ("wrong_value", "exact")),
        ({**RIGHT, "exact": ""}, ("wrong_value", "exact")),
        ({**RIGHT, "place": {"number": 5}}, ("wrong_value", "place")),
        ({**RIGHT, "place": {"street": "Main St.", "x": 1}}, ("wrong_value", "place")),
        ({**RIGHT, "city": None}, ("wrong_value", "city")),
    ],
)
def test_the_first_difference_is_named(arguments: dict[str, Any], found: tuple[str, str]) -> None:
    assert difference(arguments, ANSWERS, DOCUMENT) == found


def test_each_function_is_in_one_part() -> None:
    sft, rl = _Task.create(part="sft"), _Task.create()
    parts = {"sft": sft.rows("train"), "rl": rl.rows("train"), "heldout": rl.rows("heldout")}
    both = _Task.create(part="both")
    assert sft.rows("heldout") == rl.rows("heldout") == both.rows("heldout")
    assert both.rows("train") == [*sft.rows("train"), *rl.rows("train")]
    names = {part: {rl.answers[row["id"]][0] for row in rows} for part, rows in parts.items()}
    assert all(names.values())
    assert sum(len(one) for one in names.values()) == len(_Rows.names)
    assert all(part_of(name) == part for part, found in names.items() for name in found)
    assert sum(len(rows) for rows in parts.values()) == 2 * len(_Rows.names)


def test_gold_and_expert_solve_every_row_and_empty_answers_none() -> None:
    task = _Task.create()
    for index in range(len(task.rows("train"))):
        episode = task.episode("train", index)
        for action, reward in ((task.gold(episode.payload)[0], 1.0), ("", 0.0)):
            with SyncSession(task, episode) as session:
                assert task.expert(session.messages) == task.gold(episode.payload)[0]
                assert session.step(action).done
                assert session.outcome().reward == reward


@pytest.mark.parametrize(
    ("action", "hint"),
    [
        ("I do not know.", "one function call"),
        (call_text("common", RIGHT), "The function to call is weather.of_"),
        (call_text("{}", {**RIGHT, "city": "Rome"}), "city is not what the question says"),
        (call_text("{}", {"city": "NYC"}), "days"),
    ],
)
def test_each_mistake_has_a_hint_without_the_answer(action: str, hint: str) -> None:
    task = _Task.create()
    episode = task.episode("train", 0)
    name, _ = task.answers[episode.payload["id"]]
    with SyncSession(task, episode) as session:
        found = session.step(action.replace('"{}"', json.dumps(name))).error
    assert found is not None
    text = render_hint(found, templates=TEMPLATES.extended(task.hint_templates))
    assert hint in text
    assert "New York" not in text


def test_the_prompt_holds_the_documents_as_json_schemas() -> None:
    task = _Task.create()
    system, user = task.prompt(task.rows("train")[0])
    assert user["content"].endswith("?")
    lines = system["content"].splitlines()
    schemas = [json.loads(line) for line in lines if line.startswith('{"name": "weather')]
    assert schemas[0]["parameters"]["type"] == "object"
    assert schemas[0]["parameters"]["properties"]["limit"]["type"] == "number"


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UnusableTask, match=r"options.part is 'test': write"):
        _Task.create(part="test")
