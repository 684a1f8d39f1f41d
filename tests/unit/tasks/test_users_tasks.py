"""A task written with the public names alone: rows, tools, errors, rewards and hints."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from composer_mesh import (
    Reply,
    Row,
    Session,
    SyncSession,
    Task,
    TaskSettings,
    ToolError,
    Transcript,
    reward,
    tool,
)
from composer_mesh.rollouts.hints import HintTemplates, hint_templates, render_hint
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.running import RunningEpisode

STOCK = {"pen": 3, "book": 1}


def double(number: float) -> float:
    """Doubles a number."""
    return 2 * number


class Shop(Session):
    """A cart that the tools of one episode share."""

    tools = (double,)

    def start(self) -> None:
        self.cart: dict[str, int] = {}

    @tool
    def add(self, item: Literal["pen", "book"], count: int = 1) -> dict[str, int]:
        """Puts an item in the cart.

        Args:
            item: Name of the item.
            count: How many of it.
        """
        if count > STOCK[item]:
            facts = {"item": item, "stock": str(STOCK[item])}
            raise ToolError("no_stock", f"only {STOCK[item]} in stock", facts)
        self.cart[item] = self.cart.get(item, 0) + count
        return self.cart

    @tool(errors={KeyError: "not_in_cart"})
    async def remove(self, item: str) -> str:
        """Takes an item out of the cart."""
        await asyncio.sleep(0)
        del self.cart[item]
        return "done"

    @tool(name="pay")
    def finish(self) -> str:
        """Ends the shopping."""
        self.end()
        return "paid"

    def reply(self, text: str) -> Reply | str:
        return "Call a tool." if "?" in text else Reply()


class Shopping(Task):
    """Buy what is asked for."""

    session_class = Shop
    hint_templates: ClassVar[dict[str, str]] = {"no_stock": "There is only {stock} of {item}."}

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"wanted": rng.choice(["pen", "book"]), "number": rng.randint(1, 1000)}

    def prompt(self, row: Any) -> str:
        return f"Buy one {row['wanted']}."

    @reward
    def bought(self, transcript: Transcript) -> float:
        session = transcript.session
        assert isinstance(session, Shop)
        return float(session.cart == {transcript.row["wanted"]: 1})

    @reward(weight=0.5, name="short")
    async def few_turns(self, transcript: Transcript) -> float:
        return 1.0 if transcript.turns <= 2 else 0.0


@pytest.fixture
def shopping() -> Shopping:
    return Shopping.create(TaskSettings(seed=1, max_turns=4))


def opened(task: Task, index: int = 0) -> SyncSession:
    return SyncSession(task, task.episode("train", index))


def test_the_schema_of_a_tool_is_made_from_its_signature_and_docstring(shopping: Task) -> None:
    functions = {one["function"]["name"]: one["function"] for one in shopping.tools}
    assert list(functions) == ["add", "remove", "pay", "double"]
    add = functions["add"]
    assert add["description"] == "Puts an item in the cart."
    assert add["parameters"]["required"] == ["item"]
    assert add["parameters"]["properties"]["item"]["enum"] == ["pen", "book"]
    assert add["parameters"]["properties"]["count"]["description"] == "How many of it."


def test_state_lives_from_call_to_call_and_rewards_read_it(shopping: Task) -> None:
    wanted = shopping.episode("train", 0).payload["wanted"]
    session = opened(shopping)
    assert session.messages == [{"role": "user", "content": f"Buy one {wanted}."}]
    session.step(call_text("add", {"item": wanted}))
    assert json.loads(session.messages[-1]["content"]) == {wanted: 1}
    assert session.step(call_text("pay", {})).done
    outcome = session.outcome()
    assert outcome.rewards == {"bought": 1.0, "short": 1.0}
    assert (outcome.reward, outcome.success, outcome.answer) == (1.5, True, None)


def test_an_error_of_a_tool_is_an_error_site_with_the_tasks_own_hint(shopping: Task) -> None:
    session = opened(shopping)
    error = session.step(call_text("add", {"item": "book", "count": 9})).error
    assert error is not None
    assert (error.error_kind, error.data) == ("no_stock", {"item": "book", "stock": "1"})
    assert session.messages[-1]["content"] == "error: only 1 in stock"
    assert render_hint(error, templates=hint_templates(shopping.hint_templates)) == (
        "Hint: There is only 1 of book."
    )


def test_an_exception_that_a_tool_names_is_an_error_of_the_agent(shopping: Task) -> None:
    error = opened(shopping).step(call_text("remove", {"item": "pen"})).error
    assert error is not None
    assert (error.error_kind, error.hint_template_key) == ("not_in_cart", "tool_error")
    assert render_hint(error, templates=HintTemplates({"tool_error": "{text}"})) == "Hint: 'pen'"


def test_a_function_without_state_is_a_tool_too(shopping: Task) -> None:
    session = opened(shopping)
    session.step(call_text("double", {"number": 1.5}))
    assert session.messages[-1]["content"] == "3.0"


def test_a_reply_may_go_on_and_an_answer_ends_the_episode(shopping: Task) -> None:
    session = opened(shopping)
    assert not session.step("What?").done
    assert session.messages[-1] == {"role": "user", "content": "Call a tool."}
    assert session.step("Nothing.").done
    assert session.outcome().reward == 0.5


def test_the_same_seed_gives_the_same_rows_and_splits_share_none(shopping: Task) -> None:
    again = Shopping.create(TaskSettings(seed=1))
    assert again.episode("train", 5) == shopping.episode("train", 5)
    rows = {
        split: {shopping.identity(shopping.episode(split, i).payload) for i in range(200)}
        for split in ("train", "heldout")
    }
    assert not rows["train"] & rows["heldout"]


class Questions(Task):
    """Rows of a file."""

    def prompt(self, row: Any) -> str:
        return str(row["question"])

    @reward
    def right(self, transcript: Transcript) -> float:
        return float(transcript.answer == str(transcript.row["answer"]))


ROWS = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(10)]


def jsonl(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    return path


def parquet(folder: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def dataset(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "rows"))
    return folder / "rows"


@pytest.mark.parametrize("write", [jsonl, parquet, dataset])
def test_rows_come_from_a_file_and_equal_ones_count_once(write: Any, tmp_path: Path) -> None:
    task = Questions.create(TaskSettings(path=write(tmp_path), heldout_every=5))
    assert [task.episode("heldout", i).payload["question"] for i in (0, 1)] == ["4 + 1?", "9 + 1?"]
    assert task.episode("train", 8).payload == task.episode("train", 0).payload
    session = opened(task)
    session.step("1")
    assert session.outcome().success


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[1]\n", "row 1 is a list, not an object"),
        ("", "has no rows"),
        ('{"a": 1}\n', "1 different rows and none is for 'heldout'"),
        ('{"id":"x\\udcff"}\n', "line 1 holds .* half a character"),
    ],
)
def test_unusable_rows_are_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    task = Questions.create(TaskSettings(path=path))
    with pytest.raises(UnusableTask, match=said):
        task.episode("train", 0)


def untyped(item: Any, other) -> str:  # type: ignore[no-untyped-def]
    return str(item)


def variadic(*items: str) -> str:
    return "".join(items)


@pytest.mark.parametrize(
    ("function", "said"),
    [(untyped, "no type for 'other'"), (variadic, "an agent names each argument")],
)
def test_a_tool_without_types_is_refused(function: Any, said: str) -> None:
    class Odd(Session):
        tools = (function,)

    class OddTask(Questions):
        session_class = Odd

    with pytest.raises(UnusableTask, match=said):
        _ = OddTask.create().tools


class Faulty(Questions):
    """A task whose own code is wrong."""

    @reward
    def wrong(self, transcript: Transcript) -> float:
        return float("nan") if transcript.answer == "nan" else {}["no key"]


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("nan", UnusableTask, "reward 'wrong' of task 'faulty' returned 'nan' for train episode 0"),
        ("x", TaskCodeError, r"test_users_tasks\.py:\d+: KeyError: 'no key'"),
    ],
)
def test_a_fault_of_the_tasks_own_code_names_the_function_and_the_line(
    text: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    session = opened(Faulty.create(TaskSettings(path=jsonl(tmp_path))))
    session.step(text)
    with pytest.raises(error, match=said):
        session.outcome()


def test_neither_tasks_nor_workflows_load_torch_or_monarch() -> None:
    code = (
        "import sys, composer_mesh\n"
        "from composer_mesh import Task, Session, tool, reward, Workflow\n"
        "import composer_mesh.tasks.loading, composer_mesh.tasks.running\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'monarch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("method", ["reply", "opening"])
async def test_a_message_that_cannot_be_stored_names_the_line_of_the_task(method: str) -> None:
    class Odd(Session):
        def opening(self) -> Any:
            odd = threading.Lock() if method == "opening" else "q"
            return [{"role": "user", "content": "q", "more": odd}]

        def reply(self, text: str) -> Any:
            return [{"role": "user", "content": text, "more": threading.Lock()}]

    class Asks(Task):
        session_class = Odd

        def generate(self, rng: random.Random) -> Row:
            return {"n": rng.random()}

        def prompt(self, row: Row) -> str:
            return "q"

        @reward
        def right(self, transcript: Transcript) -> float:
            return 1.0

    task = Asks.create(TaskSettings(seed=1))
    line = getattr(Odd, method).__code__.co_firstlineno
    running = RunningEpisode(task, task.episode("train", 0))
    said = f"the {method} of task '.*' has a message that JSON cannot carry"
    where = rf"test_users_tasks\.py:{line}\)"

    async def play() -> None:
        await running.begin()
        await running.step("x")

    with pytest.raises(UnusableTask, match=rf"{said} \(.*lock.*{where}"):
        await play()
