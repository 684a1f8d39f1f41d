"""`check` plays a dry episode: what a user's task does wrong is said with its line, or plainly.

An episode for ordinary code: each call has a limit, and its session is closed in any case.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from repository import ROOT

from composer_mesh import Row, Session, Task, ToolError, Transcript, reward, tool
from composer_mesh.planning.model_sizes import parameter_count, sizes_of
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.services.checks.task import TimedEpisode, check_task, example_arguments, facts_of
from composer_mesh.services.cli import main
from composer_mesh.tasks.errors import TaskCodeError, TaskTimeout, UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.tool import ToolSpec

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
GOOD = '''
from composer_mesh import Session, Task, ToolError, reward, tool

class Counting(Session):
    def start(self):
        self.count = 0

    @tool
    def add(self, by: int) -> str:
        """Adds."""
        self.count += by
        return str(self.count)

    @tool
    def stop(self) -> str:
        """Ends the episode."""
        self.end()
        return "ended"

    def reply(self, text):
        return None

    def close(self):
        pass

class Count(Task):
    session_class = Counting

    def generate(self, rng):
        return {"goal": rng.randint(1, 10**6)}

    def prompt(self, row):
        return "Count."

    @reward
    def three(self, transcript):
        return float(transcript.session.count == 3)

    def verified_answer(self, episode):
        return str(episode.payload["goal"])
'''
CORRUPTED = """
    def corrupted(self, messages, rng):
        return "Four."
"""
EXPERT = f"""
    def expert(self, messages):
        return "Three."
{CORRUPTED}"""
CALLS_THEN_ANSWERS = f"""{CORRUPTED}
    def expert(self, messages):
        if len(messages) > 1:
            return "x"
        return '<tool_call>{{"name": "add", "arguments": {{"by": 1}}}}</tool_call>'
"""
Check = Callable[..., int]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Checks the quickstart with a user's task in place of its own."""

    def run(source: str, *overrides: str, command: str = "check") -> int:
        (tmp_path / "count.py").write_text(source)
        settings = [f"data.task={tmp_path / 'count.py'}:Count", "replay.beta=0", *overrides]
        return main([command, QUICKSTART, *(w for one in settings for w in ("--set", one))])

    return run


def test_a_good_task_is_played_by_its_expert_and_nothing_is_amiss(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    source = GOOD.replace("count == 3", "count == 0") + EXPERT
    assert check(source) == 0
    told = [one for one in capsys.readouterr().out.splitlines() if one.startswith("task 'count'")]
    assert told == ["task 'count': a dry episode by its expert took 1 turns, reward 1, a success"]


def test_an_expert_without_success_is_told(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(GOOD + EXPERT) == 0
    assert "its expert's episode does not succeed" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_warm_start_without_an_expert_is_refused(
    check: Check, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(GOOD, command=command) == 2
    said = capsys.readouterr().err
    assert "task 'count' has no expert but policy.path is not set" in said
    assert "define expert(self, messages), or set policy.path" in said


def test_experts_that_err_need_wrong_actions(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (GOOD + EXPERT).replace(CORRUPTED, "")
    assert check(source) == 2
    assert "which policy.warm_start.error_rate above 0 needs" in capsys.readouterr().err
    assert check(source, "policy.warm_start.error_rate=0") == 0


def test_builtin_teachers_without_an_expert_are_refused(build_config: Any) -> None:
    class NoExpert(Task):
        """A task that nothing can play."""

    teachers = [{"name": name, "kind": "builtin"} for name in "ab"]
    policy, replay = {"path": "models/mine"}, {"beta": 0.1, "ask": 2, "teachers": teachers}
    check_task(build_config(policy=policy), NoExpert.create())
    with pytest.raises(UnusableTask, match="has teachers or a hint writer of kind 'builtin'"):
        check_task(build_config(policy=policy, replay=replay), NoExpert.create())


MISTAKES = {
    "def start(self):\n        self.count = 0": ("def start(self):\n        1 / 0", "1 / 0"),
    "self.count += by": ("self.count += by['x']", "by['x']"),
    'return "Count."': ("return row['nothing']", "row['nothing']"),
    "        return None": ("        return text[9]", "text[9]"),
    "return float(transcript.session.count == 3)": ("return 1 / (0 * 1)", "1 / (0 * 1)"),
    "    def close(self):\n        pass": ("    def close(self):\n        1 // 0", "1 // 0"),
    "return str(episode.payload": ("return len(3), str(episode.payload", "len(3)"),
    'return {"goal": rng.randint(1, 10**6)}': ('return {"goal": rng.what}', "rng.what"),
}


@pytest.mark.parametrize("right", MISTAKES)
def test_an_error_of_any_function_names_the_line_of_the_user(
    check: Check, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, mark = MISTAKES[right]
    assert right in GOOD
    source = GOOD.replace(right, wrong)
    source += CALLS_THEN_ANSWERS
    line = next(n for n, text in enumerate(source.splitlines(), 1) if mark in text)
    assert check(source) == 2
    assert f"count.py:{line}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ("return float(", "return float('nan') * float(", "returned 'nan'"),
        ('return "Count."', "return []", "opens an episode with no message"),
        ("def add(self, by: int)", "def add(self, by)", "has no type for 'by'"),
        ("return str(self.count)", "return object()", "which JSON cannot carry"),
        ("        return None", "        raise ToolError('k', 't', hint='h')", "does not exist"),
        (
            "        return None",
            "        raise ToolError('k', 't', hint='unknown_tool')",
            "names the field 'tool'",
        ),
        ("self.count += by", "__import__('threading').Event().wait()", "did not return within"),
    ],
)
def test_a_value_that_no_run_takes_is_refused(
    check: Check, right: str, wrong: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = check(GOOD.replace(right, wrong) + CALLS_THEN_ANSWERS, "environment.call_s=5.0")
    said = capsys.readouterr()
    assert status == 2, said.out
    assert why in said.err


def test_what_a_task_lacks_is_told_plainly(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    source = GOOD.replace("    @reward\n", "").replace("def verified_answer", "def something")
    assert check(source + EXPERT) == 0
    said = capsys.readouterr().out
    assert "task 'count' has no reward functions" in said
    assert "task 'count' has no verified_answer, so hints are not checked for leaks" in said


class Place(BaseModel):
    x: Annotated[int, Field(ge=3)]
    names: list[str] = []


def function(
    text: str,
    short: Annotated[str, Field(min_length=3)],
    count: Annotated[int, Field(ge=5, le=9)],
    below: Annotated[int, Field(lt=0)],
    share: Annotated[float, Field(gt=0, lt=1)],
    even: Annotated[int, Field(multiple_of=2)],
    word: Literal["a", "b"],
    flag: bool,
    maybe: int | None,
    items: Annotated[list[int], Field(min_length=2)],
    table: dict[str, int],
    place: Place,
    optional: int = 3,
) -> str:
    """Does nothing."""
    return ""


def test_example_arguments_are_valid_for_the_tool_that_they_are_made_for() -> None:
    spec = ToolSpec(function, is_method=False)
    arguments: dict[str, Any] = example_arguments(spec.schema["function"]["parameters"])
    assert "optional" not in arguments
    spec.checked(arguments)


def test_example_arguments_of_a_schema_without_end_end() -> None:
    endless = {"$ref": "#/$defs/A"}
    schema = {
        "properties": {"a": endless},
        "required": ["a"],
        "$defs": {"A": {"type": "object", "required": ["a"], "properties": {"a": endless}}},
    }
    assert str(example_arguments(schema)).count("a") < 20


def test_the_rows_the_model_and_the_work_of_a_step_are_printed(build_config: Any) -> None:
    schedule = {"prompts_per_step": 4, "group_size": 3}
    config = build_config(schedule=schedule, environment={"max_turns": 2})
    sampled = 2 * config.generator.max_new_tokens
    assert sampled < config.policy.max_context
    rows, evaluation, model, step, time = facts_of(config, make_task(config), 7)
    assert rows == "training rows of 'toolbox': generated"
    assert evaluation == "an evaluation: 7 held-out episodes"
    count = parameter_count(sizes_of(config.policy))
    assert f"{count:,} parameters, {config.policy.vocab_size:,} tokens of vocabulary" in model
    assert f"4 groups of 3 rollouts, at most {12 * sampled:,} sampled tokens" in step
    assert f"{12 * config.policy.max_context:,} with all that they read" in step
    assert "not known before the first one" in time


@pytest.mark.parametrize(
    ("loss", "warned"),
    [
        ({"kind": "grpo"}, True),
        ({"kind": "grpo", "correction": "token_truncate"}, False),
        ({"kind": "dppo"}, False),
    ],
)
def test_fp8_rollouts_without_a_correction_are_said(
    build_config: Any, loss: dict[str, str], warned: bool
) -> None:
    served = {"quantization": "fp8", "dtype": "bfloat16"}
    config = build_config(generator=served, loss=loss)
    lines = [*facts_of(config, make_task(config), 7)]
    advice = "nothing corrects for its log-probs: set loss.correction to 'token_truncate'"
    assert any(advice in line for line in lines) == warned


def test_the_rows_of_a_file_are_counted(build_config: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}\n' for n in range(40)]
    file.write_text("".join(lines), encoding="utf-8")
    config = build_config(data={"task": "gsm8k", "path": str(file)})
    task = make_task(config)
    rows = len(task.rows("train") or [])
    assert 0 < rows < 40
    assert next(facts_of(config, task, 2)) == f"training rows of 'gsm8k': {rows}"


def test_a_model_that_cannot_be_counted_is_said(build_config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    config = build_config(policy={"path": str(tmp_path)})
    lines = list(facts_of(config, make_task(config), 2))
    assert "parameters not counted" in lines[2]
    assert "mamba" in lines[2]


CLOSED: list[str] = []


RELEASED = threading.Event()


class Trouble(Session):
    @tool
    def work(self) -> str:
        """Works."""
        return str(threading.current_thread().daemon)

    @tool
    async def block(self) -> str:
        """Blocks the event loop."""
        RELEASED.wait()
        return ""

    async def reply(self, text: str) -> Any:
        if text == "wrong":
            raise ToolError("wrong", "that is wrong")
        if text == "hang":
            await asyncio.Event().wait()
        raise KeyError(text)

    def close(self) -> None:
        CLOSED.append(self.row["name"])
        if self.row["name"] == "bad":
            raise OSError("it cannot be closed")


class TroubleTask(Task):
    session_class = Trouble
    name_of_rows = "good"

    def rows(self, split: str) -> list[Row]:
        return [{"name": self.name_of_rows}]

    def prompt(self, row: Row) -> str:
        return "?"

    @reward
    def one(self, transcript: Transcript) -> float:
        return 1.0


@pytest.fixture
def task() -> TroubleTask:
    CLOSED.clear()
    return TroubleTask.create()


def opened(task: Task, limit_s: float = 30.0) -> TimedEpisode:
    return TimedEpisode(task, task.pick("train", 0), limit_s)


def test_plain_functions_run_in_threads_that_hold_up_no_exit(task: TroubleTask) -> None:
    with opened(task) as episode:
        episode.begin()
        assert episode.step(call_text("work", {})).messages[0]["content"] == "True"
        assert episode.outcome().reward == 1.0
        assert CLOSED == []
    assert CLOSED == ["good"]


def play(task: Task, *actions: str, limit_s: float = 30.0) -> None:
    with opened(task, limit_s) as episode:
        episode.begin()
        for action in actions:
            episode.step(action)


def test_a_session_is_closed_after_an_error_which_is_the_one_that_is_raised(
    task: TroubleTask,
) -> None:
    with pytest.raises(TaskCodeError, match="KeyError: 'x'") as good:
        play(task, "x")
    task.name_of_rows = "bad"
    with pytest.raises(TaskCodeError, match="KeyError: 'x'") as bad:
        play(task, "x")
    assert CLOSED == ["good", "bad"]
    assert not hasattr(good.value, "__notes__")
    assert "it cannot be closed" in bad.value.__notes__[0]


def test_an_error_at_the_close_is_raised_where_there_was_none(task: TroubleTask) -> None:
    task.name_of_rows = "bad"
    with pytest.raises(TaskCodeError, match="it cannot be closed"):
        play(task)


def test_a_function_that_does_not_return_is_named_with_its_limit(task: TroubleTask) -> None:
    with pytest.raises(TaskTimeout, match=r"reply of task .* within 5 s"):
        play(task, "hang", limit_s=5.0)


def test_a_coroutine_that_blocks_its_loop_is_named_with_its_line(task: TroubleTask) -> None:
    try:
        with pytest.raises(UnusableTask, match=r"(?s)blocked its event loop.*RELEASED\.wait"):
            play(task, call_text("block", {}), limit_s=3.0)
    finally:
        RELEASED.set()
    assert CLOSED == []  # nothing can be called on a loop that is blocked
