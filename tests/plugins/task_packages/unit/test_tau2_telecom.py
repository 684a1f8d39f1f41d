"""tau2's telecom tickets, with a small environment of our own in place of the package's.

A package that is not there, or is another version, is refused with what to install.
"""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import create_model

from composer_mesh.plugins.task_packages.requirement import Requirement
from composer_mesh.plugins.task_packages.tau2_telecom import Tau2Telecom
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings


class Phone:
    """An environment with one switch and a line that can be refuelled."""

    policy = "Switch data on."

    def __init__(self) -> None:
        self.on, self.gigabytes, self.synchronized = True, 0.0, 0

    def get_tools(self) -> list[Any]:
        params = create_model("parameters", gb_amount=(float, ...))
        tool = SimpleNamespace(name="refuel_data", short_desc="Add.", long_desc="", params=params)
        return [tool]

    def get_user_tools(self) -> list[Any]:
        params = create_model("parameters")
        return [SimpleNamespace(name="toggle_data", short_desc="", long_desc="", params=params)]

    def set_state(self, data: Any, actions: list[Any], history: list[Any]) -> None:
        self.on = not actions

    def make_tool_call(self, name: str, requestor: str, **arguments: Any) -> Any:
        if name == "toggle_data":
            self.on = not self.on
            return "toggled"
        if arguments["gb_amount"] <= 0:
            raise ValueError("the amount must be positive")
        self.gigabytes += arguments["gb_amount"]
        return {"gigabytes": self.gigabytes}

    def sync_tools(self) -> None:
        self.synchronized += 1

    def to_json_str(self, result: Any) -> str:
        return str(result)

    def run_env_assertion(self, assertion: Any, raise_assertion_error: bool) -> bool:
        return self.on is assertion.assert_value


def entry(identity: str, function: str = "assert_on", basis: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        id=identity,
        ticket="Data does not work.",
        initial_state=SimpleNamespace(initialization_actions=[SimpleNamespace(func_name="off")]),
        evaluation_criteria=SimpleNamespace(
            actions=[
                SimpleNamespace(name="toggle_data", arguments={}, compare_args=None),
                SimpleNamespace(
                    name="refuel_data", arguments={"gb_amount": 2.0}, compare_args=["gb_amount"]
                ),
            ],
            env_assertions=[SimpleNamespace(func_name=function, assert_value=True)],
            reward_basis=["ENV_ASSERTION", *basis],
        ),
    )


class FakeTelecom(Tau2Telecom):
    entries_of_package = (
        entry("a[PERSONA:None]"),
        entry("a[PERSONA:Easy]"),
        entry("b[PERSONA:None]", basis=("ACTION",)),
    )

    @cached_property
    def library(self) -> Any:
        ids = [one.id for one in self.entries_of_package]
        splits = {"train": ids, "test": ids[:1], "base": ids[2:], "small": [], "full": ids}
        return SimpleNamespace(
            tasks=lambda: list(self.entries_of_package), splits=lambda: splits, environment=Phone
        )


def scored(task: Tau2Telecom, actions: list[str]) -> tuple[float, list[str]]:
    kinds = []
    with SyncSession(task, task.episode("heldout", 0)) as session:
        for action in actions:
            step = session.step(action)
            kinds += [step.error.error_kind] if step.error else []
            if step.done:
                break
        return session.outcome().reward, kinds


def made(**options: Any) -> FakeTelecom:
    return FakeTelecom.create(TaskSettings(max_turns=9), **options)


@pytest.mark.parametrize("split", ["test", "base"])
def test_gold_is_accepted_and_an_empty_answer_is_refused(split: str) -> None:
    task = made(evaluate=split)
    assert scored(task, task.gold(task.episode("heldout", 0).payload)) == (1.0, [])
    assert scored(task, [""]) == (0.0, [])


def test_actions_count_only_where_the_reward_depends_on_them() -> None:
    only_switched = [call_text("toggle_data", {}), "done"]
    assert scored(made(evaluate="test"), only_switched)[0] == 1.0
    assert scored(made(evaluate="base"), only_switched)[0] == 0.0
    another_amount = [call_text("refuel_data", {"gb_amount": 1.0}), *only_switched]
    assert scored(made(evaluate="base"), another_amount)[0] == 0.0


def test_refused_and_wrong_calls_are_error_sites() -> None:
    calls = [
        call_text("refuel_data", {"gb_amount": -1}),
        call_text("refuel_data", {"gb_amount": "2"}),
        call_text("refuel_data", {"gb_amount": float("inf")}),
        call_text("set_state", {}),
        call_text("toggle_data", {"x": 1}),
    ]
    kinds = ["refused_call", "wrong_type", "malformed_call", "unknown_tool", "unknown_argument"]
    assert scored(made(), calls)[1] == kinds


def test_what_is_evaluated_is_not_trained_on_with_another_persona() -> None:
    task = made()
    assert [row["id"] for row in task.rows("train")] == ["b[PERSONA:None]"]
    assert [row["id"] for row in task.rows("heldout")] == ["a[PERSONA:None]"]


def test_sessions_share_no_state() -> None:
    task = made()
    with SyncSession(task, task.episode("heldout", 0)) as other:
        other.step(call_text("toggle_data", {}))
        assert scored(task, ["done"])[0] == 0.0
        assert other.outcome().reward == 1.0


def test_a_task_that_names_a_private_function_or_another_judge_is_refused() -> None:
    class Private(FakeTelecom):
        entries_of_package = (entry("a", function="__class__"),) * 3

    class Judged(FakeTelecom):
        entries_of_package = (entry("a", basis=("COMMUNICATE",)),) * 3

    with pytest.raises(UnusableTask, match="not public"):
        Private.create()
    with pytest.raises(UnusableTask, match="no ticket, or no assertions"):
        Judged.create()


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UnusableTask, match="name one of small, train, test, base, full"):
        Tau2Telecom(evaluate="all")


def test_an_absent_package_is_refused_with_the_command_that_installs_it() -> None:
    absent = Requirement("t", "no-such-package-here", "no_such", ("1",), "pip install X")
    with pytest.raises(UnusableTask, match="run pip install X"):
        absent.imported()


def test_another_version_than_the_verified_one_is_refused() -> None:
    other = Requirement("t", "pydantic", "pydantic", ("0.0.1",), "pip install X")
    with pytest.raises(UnusableTask, match=r"verified with pydantic 0\.0\.1"):
        other.imported()


def test_a_package_that_lacks_what_it_needs_is_refused() -> None:
    found = (version("pydantic"),)
    broken = Requirement("t", "pydantic", "pydantic", found, "pip install X")
    assert broken.imported("version").__name__ == "pydantic.version"
    with pytest.raises(UnusableTask, match=r"cannot import pydantic\.no_such_module"):
        broken.imported("no_such_module")
