"""The guide to teacher replay says what is: settings parse, code runs, names and fates are true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from guides import QUICKSTART, Guide, as_a_run, names_in_code
from offline_runs import BUILTIN, replay_section, traces_of, write_run, write_traces
from pytest_httpserver import HTTPServer

from composer_mesh.actors.provider import errors as provider_errors
from composer_mesh.actors.provider.errors import ProviderError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.replay import DEFAULT_FILTERS, GateConfig
from composer_mesh.rollouts.consensus import VoteOutcome
from composer_mesh.rollouts.pairs import FailureKind
from composer_mesh.services.cli import main
from composer_mesh.services.offline import command as replay_command
from composer_mesh.tasks.toolbox import ToolboxTask

PAGE = Guide.read("replay.md")
RUN, TEACHERS, FILTERS = PAGE.blocks("toml")
LOAD, ANY_CHAT, _, ONE_CALL = PAGE.blocks("python")  # the pool: procs/test_teacher_pool.py
EXAMPLES = {"my_key"}


def cells(first: str) -> list[str]:
    """The row of a table that begins so, without its code marks."""
    row = next(line for line in PAGE.text.splitlines() if line.startswith(f"| `{first}` |"))
    return [cell.strip().strip("`") for cell in row.strip("|").split("|")]


def test_the_first_block_is_what_the_quickstart_trains_with() -> None:
    shown, quickstart = as_a_run(RUN).replay, load_config(QUICKSTART).replay
    assert shown == quickstart


def test_the_block_of_teachers_is_a_part_of_a_run() -> None:
    mine, bought = as_a_run(TEACHERS).replay.teachers
    assert (mine.costs, bought.key_variable) == (False, "OPENROUTER_API_KEY")


def test_the_block_of_filters_is_the_default_recipe() -> None:
    assert as_a_run(FILTERS).replay.filters == DEFAULT_FILTERS


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - EXAMPLES == set()


def errors() -> list[type[ProviderError]]:
    found = [one for one in vars(provider_errors).values() if isinstance(one, type)]
    return [one for one in found if issubclass(one, ProviderError) and one is not ProviderError]


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__name__)
def test_the_table_of_fates_is_that_of_the_errors(error: type[ProviderError]) -> None:
    _, kind, _, again, breaker, _ = cells(error.__name__)
    verdict = {"fails": "failed", "busy": "busy", "answers": "answered", "-": "nothing"}[breaker]
    assert (kind, verdict) == (error.kind.value, error.verdict.value)
    assert {"yes": True, "no": False}.get(again, False) == error.transient


def test_every_kind_of_failure_has_a_row() -> None:
    assert {cells(error.__name__)[1] for error in errors()} == {kind.value for kind in FailureKind}


@pytest.mark.parametrize("outcome", VoteOutcome)
def test_every_outcome_has_a_row(outcome: VoteOutcome) -> None:
    assert cells(outcome.value)[1]


@pytest.mark.parametrize("sign", ["error", "entropy", "disagreement", "novelty"])
def test_every_sign_of_the_gate_has_a_row(sign: str) -> None:
    assert sign in GateConfig.model_fields
    assert cells(sign)[1]


def test_the_exit_statuses_are_those_of_the_command() -> None:
    table = PAGE.text.partition("| status |")[2].partition("\n\n")[0]
    told = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M)
            for number in row.split(",")}  # fmt: skip
    own = (replay_command.NOBODY_ANSWERED, replay_command.SHORT_OF_BUDGET)
    assert told == {0, 2, 130, 143, *own}


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_config: Any, toolbox: ToolboxTask
) -> Path:
    """A working directory with what the page names."""
    config = build_config(replay=replay_section(BUILTIN))
    write_run(tmp_path / "runs" / "quickstart", config, traces_of(toolbox, 3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_can_be_typed(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    toolbox: ToolboxTask,
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    lines = re.findall(r"^    composer-mesh (replay .+?)(?:  #.*)?$", PAGE.text, re.MULTILINE)
    assert len(lines) == 4
    (place / "teachers.toml").write_text(TEACHERS)
    write_traces(place / "traces.jsonl", traces_of(toolbox, 3))
    places = [line.replace("pairs.jsonl", f"{n}.jsonl") for n, line in enumerate(lines)]
    assert [main(shlex.split(line)) for line in places] == [0, 2, 2, 2]
    said = capsys.readouterr().err
    assert said.count("OPENROUTER_API_KEY") == 3


def test_the_blocks_of_python_run_one_after_the_other(
    place: Path, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets", reason="a library of another trainer, in the dev extra")
    message = {"role": "assistant", "content": "Answer: 5"}
    reply = {"choices": [{"message": message}], "usage": {"cost": 0}}
    httpserver.expect_request("/v1/chat/completions").respond_with_json(reply)
    assert main(["replay", "runs/quickstart", "--out", "pairs.jsonl"]) == 0
    capsys.readouterr()
    for block in (LOAD, ANY_CHAT, ONE_CALL):
        names: dict[str, Any] = {}
        text = block.replace("http://localhost:8000", httpserver.url_for("").rstrip("/"))
        exec(compile(text, "docs/replay.md", "exec"), names)
        if block is ANY_CHAT:
            (row,) = names["rows"]
            assert row["chosen"][0]["content"] == "Answer: 5"
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    assert [row["state_id"] for row in names["rows"]] == [row["state_id"] for row in rows]


def test_the_rows_have_the_keys_that_the_page_tells(place: Path) -> None:
    assert main(["replay", "runs/quickstart", "--out", "pairs.jsonl"]) == 0
    row = json.loads(Path("pairs.jsonl").read_text().splitlines()[0])
    told = PAGE.text.partition("**The rows**")[2].partition("```")[0]
    assert row.keys() == set(re.findall(r"`([a-z_]+)`", told))
