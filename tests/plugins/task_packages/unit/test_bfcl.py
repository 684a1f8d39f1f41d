"""BFCL multi-turn on recorded rows, with small classes of our own in place of the package's.

Single calls of BFCL on rows of our own: the split, the comparison of calls, gold and hints.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.plugins.task_packages.bfcl.calls import contains, function_tool, parsed_call
from composer_mesh.plugins.task_packages.bfcl.single_call import BfclSingleCall, difference, part_of
from composer_mesh.plugins.task_packages.bfcl.task import BfclMultiTurn, BfclSession
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings

RECORDED = json.loads((Path(__file__).parent / "recorded/bfcl.json").read_text())


class GorillaFileSystem:
    """The functions that the recorded rows call: folders are dicts, files are texts."""

    def _load_scenario(self, scenario: dict[str, Any], long_context: bool) -> None:
        self._path: list[str] = []
        self.tree = _folder(next(iter(scenario["root"].values())))

    @property
    def root(self) -> Any:
        return self.tree

    def _here(self) -> dict[str, Any]:
        here = self.tree
        for name in self._path:
            here = here[name]
        return here

    def cd(self, folder: str) -> dict[str, str]:
        if folder == "..":
            self._path.pop()
        elif isinstance(self._here().get(folder), dict):
            self._path.append(folder)
        else:
            return {"error": f"cd: {folder}: no such folder"}
        return {"current_working_directory": "/".join(self._path)}

    def rm(self, file_name: str) -> dict[str, str]:
        if file_name not in self._here():
            return {"error": f"rm: {file_name}: no such file"}
        del self._here()[file_name]
        return {"result": "removed"}

    def rmdir(self, dir_name: str) -> dict[str, str]:
        return self.rm(dir_name)


class MessageAPI:
    def _load_scenario(self, scenario: dict[str, Any], long_context: bool) -> None:
        self.inbox = list(scenario)


def _folder(found: dict[str, Any]) -> Any:
    if found["type"] == "file":
        return found["content"]
    return {name: _folder(one) for name, one in found["contents"].items()}


class RecordedSource:
    """The recorded rows, documents and classes."""

    def rows(self, category: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = RECORDED["rows"].get(category, [])
        return found

    def gold(self, category: str) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = RECORDED["gold"].get(category, {})
        return found

    def documents(self, api: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = RECORDED["documents"][api]
        return found

    def api(self, name: str) -> type[Any]:
        return {"GorillaFileSystem": GorillaFileSystem, "MessageAPI": MessageAPI}[name]


class RecordedBfcl(BfclMultiTurn):
    @cached_property
    def source(self) -> Any:
        return RecordedSource()


def made(category: str, **options: Any) -> RecordedBfcl:
    settings = TaskSettings(max_turns=20)
    return RecordedBfcl.create(settings, **{"train": [], "evaluate": [category], **options})


def played(task: BfclMultiTurn, actions: list[str]) -> tuple[float, list[str], list[str]]:
    """Return the reward of actions, the kinds of their errors, and what was shown."""
    kinds: list[str] = []
    with SyncSession(task, task.episode("heldout", 0)) as session:
        for action in actions:
            step = session.step(action)
            kinds += [step.error.error_kind] if step.error else []
            if step.done:
                break
        shown = [str(one.get("content")) for one in session.messages]
        return session.outcome().reward, kinds, shown


@pytest.mark.parametrize("category", ["base", "miss_func"])
def test_gold_is_accepted_and_an_empty_answer_is_refused(category: str) -> None:
    task = made(category)
    gold = task.gold(task.episode("heldout", 0).payload)
    assert played(task, gold)[:2] == (1.0, [])
    reward, kinds, _ = played(task, [""] * 5)
    assert (reward, kinds) == (0.0, ["no_call"])


def test_base_is_never_trained_on() -> None:
    with pytest.raises(UnusableTask, match=r"'base', the public benchmark.*never trained on"):
        BfclMultiTurn(train=["miss_func", "base"])
    task = RecordedBfcl.create(TaskSettings(heldout_every=47))
    assert task.rows("train") == []
    assert [row["id"] for row in task.rows("heldout")] == ["multi_turn_base_46"]


def test_variants_of_a_scenario_that_is_held_out_are_not_trained_on() -> None:
    held = RecordedBfcl.create(TaskSettings(heldout_every=47), train=["miss_func"])
    free = RecordedBfcl.create(TaskSettings(heldout_every=5), train=["miss_func"])
    assert (len(held.rows("train")), len(held.rows("heldout"))) == (0, 1)
    assert (len(free.rows("train")), len(free.rows("heldout"))) == (1, 0)


def test_a_held_back_function_appears_in_its_turn_and_not_before() -> None:
    task = made("miss_func")
    remove = call_text("rm", {"file_name": "DylanProject.txt"})
    reward, kinds, shown = played(task, [remove, "I cannot.", "done"])
    assert kinds == ["unknown_tool", "no_call"]
    assert reward == 0.0
    assert '"name": "rm"' not in shown[0]
    assert any('"name": "rm"' in text for text in shown[1:])


def test_state_that_differs_from_gold_ends_the_episode_without_a_reward() -> None:
    task = made("base")
    actions = [call_text("cd", {"folder": "Drafts"}), "done"]
    assert played(task, actions)[:2] == (0.0, ["wrong_state"])


def test_wrong_calls_are_error_sites_and_never_evaluated() -> None:
    task = made("base")
    actions = [
        call_text("cd", {"folder": "nowhere"}),
        call_text("cd", {"folder": 3}),
        call_text("__import__", {"name": "os"}),
        call_text("_load_scenario", {}),
        call_text("rm", {"file_name": "__import__('os').abort()"}),
    ]
    wanted = ["function_error", "wrong_type", "unknown_tool", "unknown_tool", "function_error"]
    assert played(task, actions)[1] == wanted


def test_sessions_share_no_state() -> None:
    task = made("base")
    gold = task.gold(task.episode("heldout", 0).payload)
    with SyncSession(task, task.episode("heldout", 0)) as other:
        other.step(gold[0])
        assert played(task, gold)[0] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "f(g())",
        "f(x)",
        "f(*a)",
        "f(",
        "f.g(1)",
        "f(**{'a': b})",
        "1",
    ],
)
def test_gold_calls_are_parsed_and_anything_but_literals_is_refused(text: str) -> None:
    with pytest.raises(UnusableTask, match="is not a call with literal arguments"):
        parsed_call(text)


def test_gold_calls_keep_their_values() -> None:
    assert parsed_call("f('a', b=[1, -2.5], c={'d': True})") == (
        "f",
        ["a"],
        {"b": [1, -2.5], "c": {"d": True}},
    )


def test_results_count_as_often_as_gold_has_them() -> None:
    assert contains(["b", "a", "a"], ["a", "a"])
    assert not contains(["a", "b"], ["a", "a"])


@pytest.mark.parametrize("value", [10**9, float("inf"), "9"])
def test_arguments_whose_cost_grows_with_them_are_bounded(value: Any) -> None:
    numbers = {"type": "float", "description": ""}
    document = {
        "name": "power",
        "description": "",
        "parameters": {
            "properties": {"base": numbers, "exponent": numbers},
            "required": ["base", "exponent"],
        },
    }
    tool = function_tool(document, BfclSession.call)
    given = {"base": 2, "exponent": 3}
    assert tool.checked(given) == {"name": "power", "arguments": given}
    with pytest.raises(Exception, match="exponent"):
        tool.checked({"base": 2, "exponent": value})


def test_a_row_with_an_unknown_class_is_refused() -> None:
    from composer_mesh.plugins.task_packages.bfcl.calls import PackageSource

    with pytest.raises(UnusableTask, match="none of GorillaFileSystem"):
        PackageSource().api("os")


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
