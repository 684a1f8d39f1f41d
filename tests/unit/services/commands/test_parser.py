"""Help, examples and arguments of all commands, those of plugins included."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from composer_mesh.configs import plugins
from composer_mesh.services.cli import main
from composer_mesh.services.commands.parser import EXAMPLES, GROUPS, Command, make_parser
from composer_mesh.services.directory.status import RunStatus, write_status

OWN = {name: one.load() for name, one in plugins.own("commands").items()}
HIDDEN = {"island-job"}


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    return capsys.readouterr().out


def test_the_help_lists_each_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    out = help_of(capsys=capsys)
    assert all(f"\n{title}:\n" in out for group, title in GROUPS.items() if group != "others")
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", out, re.MULTILINE)
    assert sorted(listed) == sorted(set(OWN) - HIDDEN)
    assert max(map(len, out.splitlines())) <= 100
    assert "examples:\n  composer-mesh train quickstart " in out


@pytest.mark.parametrize(("name", "command"), OWN.items())
def test_the_help_of_a_command_ends_with_an_example_that_it_accepts(
    name: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.group != "others" or command.hidden
    out = help_of(name, capsys=capsys)
    assert out.endswith(f"example:\n  composer-mesh {command.example}\n")
    assert make_parser(name).parse_args(shlex.split(command.example)).command == name


def test_the_examples_of_the_help_are_accepted() -> None:
    for example in EXAMPLES:
        name, *_ = words = shlex.split(example)
        assert make_parser(name).parse_args(words).command == name


@pytest.mark.parametrize(("name", "command"), OWN.items())
def test_an_option_has_one_meaning_in_all_commands(
    name: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    out = help_of(name, capsys=capsys)
    assert not re.search(r"--out\b(?!p)", out)
    assert not re.search(r"--json [A-Z]", out), "--json prints, --report FILE writes"
    assert "--output" not in out or re.search(r"--output (DIR|FILE)\b", out)
    if re.search(r"^  RUN  ", out, re.MULTILINE):
        assert re.search(r"\[RUN( \.\.\.)?\]", out), "RUN is optional"
        assert "the newest in runs/" in " ".join(out.split())


def test_no_words_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "inspect and control a run:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "'trian' is not a command: did you mean train?"),
        (["zzz"], "'zzz' is not a command: composer-mesh --help lists the commands"),
        (
            ["train", "x", "--outptu", "y"],
            "unrecognized arguments: --outptu y: did you mean --output?",
        ),
        (["train"], "the following arguments are required: CONFIG"),
        (["traces", "shw", "1/2"], "'1/2' is not an action: did you mean show?"),
        (["traces", "list", "1/2", "3"], "'3' is one word too many after list TRACE"),
        (["reward", "x", "high"], "reward takes TRACE and REWARD, --file FILE"),
    ],
)
def test_misspelled_words_are_two_lines_with_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(main(words))
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[0]
    assert len(lines) <= 2


@pytest.mark.parametrize(
    ("words", "run", "others"),
    [
        (["traces"], None, {"action": "list", "trace": None}),
        (["traces", "show", "1/2"], None, {"action": "show", "trace": "1/2"}),
        (["traces", "r", "show", "1/2"], "r", {"action": "show", "trace": "1/2"}),
        (["traces", "r", "--json", "show", "1/2"], "r", {"action": "show", "trace": "1/2"}),
        (["traces", "export", "--output", "x"], None, {"action": "export", "output": Path("x")}),
        (["reward", "t", "0.5"], None, {"trace": "t", "reward": 0.5}),
        (["reward", "r", "t", "0.5"], "r", {"trace": "t", "reward": 0.5}),
        (["reward", "r", "--file", "f"], "r", {"trace": None, "reward": None}),
        (["stacks", "--json"], None, {"json": True}),
        (["scale", "generator=2"], None, {"sizes": ["generator=2"]}),
        (["scale", "r", "generator=2", "environment=1"], "r", {}),
        (["join", "tls://x:1"], None, {"address": "tls://x:1"}),
    ],
)
def test_run_may_be_left_out(words: list[str], run: str | None, others: dict[str, object]) -> None:
    found = vars(make_parser(words[0]).parse_args(words))
    assert found["run"] == (None if run is None else Path(run))
    assert {name: found[name] for name in others} == others


def test_without_run_a_command_is_about_the_newest_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    write_status(tmp_path / "runs" / "mine", RunStatus(2**22, None, "failed", 0, 1, 0, "tcp"))
    assert main(["stacks"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "composer-mesh: the newest run is runs/mine",
        "composer-mesh: runs/mine is not running",
    ]
