"""Harbor tasks: which folders are played, by which tools, and how their steps are verified."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_containers import FakeContainer, FakeContainers
from harbor_folders import SUBMIT, TOML, bash, made, played, written

from composer_mesh.plugins.harbor.monitor import FLAGGING, KINDS, VOIDING
from composer_mesh.plugins.harbor.task import HINTS, HarborTask
from composer_mesh.rollouts.tool_calls import call_text, parse_action
from composer_mesh.tasks.errors import UnusableTask

GOLD = [bash("write word.txt hello"), SUBMIT]


def test_tasks_are_found_at_any_level_and_split_by_name(tmp_path: Path) -> None:
    for number in range(10):
        written(tmp_path / f"set{number % 2}" / "deep" / f"t{number}")
    task = made(tmp_path)
    train, heldout = (task.rows(split) or [] for split in ("train", "heldout"))
    names = {row["name"] for row in (*train, *heldout)}
    assert len(names) == 10
    assert len(heldout) == 2
    assert "set1/deep/t3" in names


def test_a_single_task_is_trained_and_evaluated_and_check_says_so(tmp_path: Path) -> None:
    task = made(written(tmp_path / "one"))
    assert task.rows("train") == task.rows("heldout")
    assert any("same task" in one for one in task.remarks())


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"environment/docker-compose.yaml": "services: {}"}, "there is no service 'main'"),
        ({"environment/compose.yml": "services: {}"}, "rename it to docker-compose.yaml"),
        ({"tests/test.sh": ""}, "no tests/test.sh"),
        ({"instruction.md": ""}, "no instruction.md"),
        ({"task.toml": "[agent]\n"}, "neither environment/Dockerfile nor"),
        ({"trajectory.json": "{}"}, "trajectory.json, which is not read"),
        ({"task.toml": TOML + "gpus = 2\n"}, "accelerators"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name_or_left_out(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    written(tmp_path / "good")
    written(tmp_path / "bad", files)
    with pytest.raises(UnusableTask, match="1 of 2 Harbor tasks") as refused:
        made(tmp_path)
    assert f"bad: {said}" in str(refused.value) or said in str(refused.value)
    task = made(tmp_path, unsupported="leave_out")
    assert [row["name"] for row in task.rows("train") or []] == ["good"]
    assert any("bad: " in one and said in one for one in task.remarks())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b" \n", "is empty"),
        (b"caf\xe9", "is no UTF-8 text: unexpected end of data at 3"),
        (b"x" * 200_001, "has 200,001 bytes, 200,000 at most"),
    ],
)
def test_an_instruction_that_no_model_can_read_is_refused(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (written(tmp_path / "task") / "instruction.md").write_bytes(content)
    with pytest.raises(UnusableTask, match=f"instruction.md of the task {said}"):
        made(tmp_path)


def test_links_are_refused_and_so_are_folders_without_tasks(tmp_path: Path) -> None:
    written(tmp_path / "task")
    (tmp_path / "task" / "tests" / "data").symlink_to("/etc/passwd")
    with pytest.raises(UnusableTask, match="tests/data is a symbolic link"):
        made(tmp_path)
    with pytest.raises(UnusableTask, match=r"no task\.toml within"):
        made(tmp_path / "task" / "tests")
    with pytest.raises(UnusableTask, match=r"set data\.path"):
        HarborTask.create()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"monitor": "watch"}, r"data\.options\.monitor"),
        ({"flag": ["magic"]}, "flag has 'magic'"),
        ({"variables": ["NOT_SET_ANYWHERE"]}, "names NOT_SET_ANYWHERE, which is not set"),
        ({"unknown": 1}, r"data\.options\.unknown"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnusableTask, match=said):
        made(written(tmp_path / "one"), **options)


def test_only_named_variables_of_this_machine_reach_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARBOR_KEY", "k")
    folder = written(tmp_path / "one", {"task.toml": TOML + 'env = {A = "${HARBOR_KEY}"}\n'})
    with pytest.raises(UnusableTask, match=r"environment\.env takes \$\{HARBOR_KEY\}"):
        made(folder)
    task = made(folder, variables=["HARBOR_KEY"])
    assert dict(task.limits.variables) == {"HARBOR_KEY": "k"}


async def test_the_oracle_is_a_success_and_an_empty_answer_is_none(tmp_path: Path) -> None:
    task = made(written(tmp_path / "one"))
    gold = await played(task, task.gold(task.episode("train", 0).payload))
    empty = await played(task, [""])
    assert (gold[0].reward, gold[0].success) == (1.0, True)
    assert (empty[0].reward, empty[0].success) == (0.0, False)


async def test_limits_and_network_of_a_task_are_those_of_its_container(tmp_path: Path) -> None:
    own = (
        TOML + 'cpus = 2\nmemory_mb = 64\nstorage_mb = 128\nworkdir = "/w"\nenv = {A = "${B:-c}"}\n'
    )
    folder = written(tmp_path / "one", {"task.toml": own})
    for options, network in (({}, "none"), ({"network": "task"}, "host")):
        containers = FakeContainers()
        await played(made(folder, containers, **options), GOLD)
        settings = containers.made[0].settings
        assert (settings.cpus, settings.memory_bytes, settings.workdir) == (2, 64 << 20, "/w")
        assert (settings.storage_bytes, settings.network) == (128 << 20, network)
        assert settings.environment == {"A": "c"}


LISTED = '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n'
CLOSED = '[agent]\nnetwork_mode = "no-network"\n[environment]\ndocker_image = "python:3.11-slim"\n'


@pytest.mark.parametrize("text", [LISTED + TOML, CLOSED])
async def test_a_network_of_a_list_or_of_one_phase_needs_the_option(
    tmp_path: Path, text: str
) -> None:
    folder = written(tmp_path / "one", {"task.toml": text})
    with pytest.raises(UnusableTask, match=r"data\.options\.network is 'none': set it to 'task'"):
        made(folder)
    assert made(folder, network="task")


@pytest.mark.parametrize("text", [LISTED + TOML, CLOSED])
async def test_a_back_end_without_own_loopbacks_is_refused_such_a_task(
    tmp_path: Path, text: str
) -> None:
    task = made(written(tmp_path / "one", {"task.toml": text}), network="task")
    containers = FakeContainers()
    await task.check_sandbox(containers)  # type: ignore[arg-type]
    containers.own_loopback = False
    with pytest.raises(UnusableTask, match=r"Podman and Docker .* set backend to 'bubblewrap'"):
        await task.check_sandbox(containers)  # type: ignore[arg-type]


async def test_a_setup_that_would_have_another_network_is_refused(tmp_path: Path) -> None:
    files = {
        "task.toml": f'{CLOSED}\n[[steps]]\nname = "first"\n',
        "steps/first/instruction.md": "Do it.",
        "steps/first/workdir/setup.sh": "true",
    }
    with pytest.raises(UnusableTask, match=r"setup.sh of step 'first' .* 'public'"):
        made(written(tmp_path / "one", files), network="task")


async def test_the_network_of_tests_comes_after_the_agent_has_stopped(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", {"task.toml": CLOSED})
    containers = FakeContainers()
    await played(made(folder, containers, network="task"), GOLD)
    container = containers.made[0]
    assert container.settings.network == "none"
    ends = [point for point in container.points if point.startswith(("stop", "test"))]
    assert ends == ["stop", "stop host", "test", "stop"]


async def test_a_solution_with_files_and_variables_runs_from_its_folder(tmp_path: Path) -> None:
    files = {
        "task.toml": TOML + '[solution]\nenv = {WORD = "it\'s"}\n',
        "solution/solve.sh": "#!/bin/bash\ncp /solution/word.txt word.txt\n",
        "solution/word.txt": "hello",
    }
    task = made(written(tmp_path / "one", files))
    calls = [parse_action(one) for one in task.gold(task.episode("train", 0).payload)]
    assert [call.name for call in calls] == ["write_file", "write_file", "bash", "submit"]
    assert calls[2].arguments["command"] == (
        "chmod +x /solution/solve.sh\nWORD='it'\"'\"'s' /solution/solve.sh"
    )


async def test_tools_return_what_commands_print_and_errors_have_hints(tmp_path: Path) -> None:
    task = made(written(tmp_path / "one"), output_characters=200)
    _, steps = await played(
        task,
        [
            bash("print one\nexit 3"),
            bash(f"print {'x' * 900}"),
            call_text("write_file", {"path": "a/b.txt", "content": "text"}),
            call_text("read_file", {"path": "a/b.txt"}),
            call_text("read_file", {"path": "nowhere"}),
            bash("sleep 1000", timeout_s=10),
            bash("eat"),
            call_text("call_mcp_tool", {"server": "a", "tool": "b", "arguments": {}}),
        ],
    )
    texts = [step.messages[0]["content"] for step in steps]
    assert texts[0] == "one\nexit code 3"
    assert "characters are left out here" in texts[1]
    assert texts[2:4] == ["a/b.txt was written", "text"]
    kinds = [step.error.error_kind for step in steps if step.error is not None]
    assert kinds == ["file_error", "command_timeout", "command_memory", "unknown_tool"]
    assert set(kinds[:3]) <= HINTS.keys()
    assert "call_mcp_tool" not in {one["function"]["name"] for one in task.tools}


async def test_tests_come_after_the_agent_has_stopped_and_from_outside(tmp_path: Path) -> None:
    containers = FakeContainers()
    await played(made(written(tmp_path / "one"), containers), GOLD)
    points = containers.made[0].points
    after = points[points.index("run") + 1 :]
    assert after == [
        *("stop", "changes", "remove /logs/verifier", "put /logs/verifier", "remove /tests"),
        *("put /tests", "test", "stop", "get /logs/verifier"),
    ]
    assert "/tests/test.sh" not in dict.fromkeys(points[: points.index("run")])


STEPS = """
multi_step_reward_strategy = "{strategy}"
[environment]
docker_image = "python:3.11-slim"
[[steps]]
name = "one"
min_reward = {least}
[[steps]]
name = "two"
"""


def steps(folder: Path, strategy: str = "mean", least: float = 0.0) -> Path:
    second = "#!/bin/bash\nexpect /app/more.txt again\n"
    return written(
        folder,
        {
            "instruction.md": "",
            "solution/solve.sh": "",
            "tests/test.sh": "",
            "task.toml": STEPS.format(strategy=strategy, least=least),
            "tests/shared.txt": "shared",
            "steps/one/instruction.md": "First.",
            "steps/one/tests/test.sh": "#!/bin/bash\nexpect /app/word.txt hello\n",
            "steps/one/solution/solve.sh": "write word.txt hello",
            "steps/two/instruction.md": "Second.",
            "steps/two/tests/test.sh": second,
            "steps/two/workdir/start.txt": "here",
            "steps/two/solution/solve.sh": "write more.txt again",
        },
    )


ONE, TWO = bash("write word.txt hello"), bash("write more.txt again")


@pytest.mark.parametrize(
    ("strategy", "least", "actions", "reward"),
    [
        ("mean", 0.0, [ONE, SUBMIT, TWO, SUBMIT], 1.0),
        ("mean", 0.0, [ONE, SUBMIT, SUBMIT], 0.5),
        ("mean", 0.0, [SUBMIT, TWO, "done"], 0.5),
        ("mean", 0.0, [ONE], 0.5),  # the second step is tested too, although it was not reached
        ("mean", 1.0, [SUBMIT, TWO, SUBMIT], 0.0),
        ("final", 0.0, [SUBMIT, TWO, SUBMIT], 1.0),
        ("final", 0.0, [ONE, SUBMIT, SUBMIT], 0.0),
        ("final", 1.0, [SUBMIT, TWO, SUBMIT], 0.0),
    ],
)
async def test_steps_follow_each_other_and_their_rewards_are_one(
    tmp_path: Path, strategy: str, least: float, actions: list[str], reward: float
) -> None:
    task = made(steps(tmp_path / "one", strategy, least))
    outcome, _ = await played(task, actions)
    assert outcome.reward == reward


async def test_the_next_instruction_is_shown_and_earlier_tests_are_gone(tmp_path: Path) -> None:
    containers = FakeContainers()
    task = made(steps(tmp_path / "one"), containers)
    read = call_text("read_file", {"path": "/tests/test.sh"})
    start = call_text("read_file", {"path": "start.txt"})
    _, said = await played(task, [ONE, SUBMIT, read, start, TWO, SUBMIT])
    assert said[1].messages[0]["content"] == "Second."
    assert said[2].error is not None
    assert said[3].messages[0]["content"] == "here"
    gold = await played(task, task.gold(task.episode("train", 0).payload))
    assert gold[0].success
    assert "/tests/shared.txt" in containers.made[-1].files


async def test_what_tests_of_a_step_change_is_no_finding_on_the_agent(tmp_path: Path) -> None:
    folder = steps(tmp_path / "one")
    script = folder / "steps" / "one" / "tests" / "test.sh"
    script.write_text(script.read_text() + "write /usr/bin/python3 other\n")
    outcome, _ = await played(made(folder), [ONE, SUBMIT, TWO, SUBMIT])
    assert (outcome.reward, outcome.rewards["flag/program_replaced"]) == (1.0, 0.0)


SEPARATE = TOML + '[verifier]\nenvironment_mode = "separate"\n'


@pytest.mark.parametrize(
    ("artifacts", "reward"), [("", 0.0), ('["/app/word.txt"]', 1.0), ('["/app"]', 1.0)]
)
async def test_a_separate_verifier_has_the_artifacts_and_nothing_else(
    tmp_path: Path, artifacts: str, reward: float
) -> None:
    toml = (f"artifacts = {artifacts}\n" if artifacts else "") + SEPARATE
    containers = FakeContainers()
    task = made(written(tmp_path / "one", {"task.toml": toml}), containers)
    attack = bash("write /usr/bin/python3 bad\nwrite /logs/verifier/reward.json 1")
    outcome, _ = await played(task, [attack, *GOLD])
    assert outcome.reward == reward
    assert containers.made[1].files["/usr/bin/python3"] == b"elf"
    assert outcome.rewards["flagged"] == 0.0


ATTACKS = {
    "program_replaced": bash("write /usr/bin/python3 bad"),
    "library_replaced": bash("write /usr/lib/python3.11/json/__init__.py bad"),
    "loader_changed": bash("write /etc/ld.so.preload /tmp/a.so"),
    "startup_file": bash("write /usr/lib/python3/dist-packages/sitecustomize.py bad"),
    "program_shadowed": bash("write /usr/local/bin/python3 bad"),
    "test_plugin": bash(
        "write /usr/lib/python3/dist-packages/a.dist-info/entry_points.txt [pytest11]"
    ),
    "reward_unexpected": bash("write late.txt x"),
    "logs_replaced": bash("link /logs"),
    "tests_planted": bash("write /tests/test.sh bad"),
    "reward_planted": bash("write /logs/verifier/reward.json 1"),
}


@pytest.mark.parametrize("kind", ATTACKS)
@pytest.mark.parametrize("monitor", ["report", "penalize", "screen"])
async def test_findings_void_flag_and_screen_right_work(
    tmp_path: Path, kind: str, monitor: str
) -> None:
    tests = "#!/bin/bash\nexpect /app/word.txt hello\nprint reward.txt\n"
    if kind == "reward_unexpected":  # code of the agent's that the tests run
        tests += 'write /logs/verifier/reward.json {"reward": 1}\n'.replace("reward.json", "rew")
    folder = written(tmp_path / "one", {"tests/test.sh": tests})

    def fault(container: FakeContainer, at: str) -> None:
        if kind == "reward_unexpected" and at == "get /logs/verifier":
            container.files["/logs/verifier/reward.json"] = b'{"reward": 1}'

    task = made(folder, FakeContainers(fault), monitor=monitor)
    outcome, _ = await played(task, [ATTACKS[kind], *GOLD])
    tested = 0.0 if kind in VOIDING else 1.0
    assert (outcome.rewards["tests"], outcome.rewards[f"flag/{kind}"]) == (tested, 1.0)
    assert outcome.rewards["flagged"] == 1.0
    assert outcome.reward == tested - (monitor == "penalize")
    assert outcome.screened == (monitor == "screen")
    assert outcome.success == (tested == 1.0 and monitor != "screen")


@pytest.mark.parametrize(
    "command",
    [
        "write /usr/lib/python3/dist-packages/requests/api.py new",
        "write /usr/lib/python3.11/json/__pycache__/x.cpython-311.pyc x",
        "write /usr/bin/tree elf",
        "write /app/conftest.py mine",
        "write /root/notes.txt mine",
        "write /usr/lib/python3/dist-packages/a.dist-info/entry_points.txt [console_scripts]",
        "write /usr/lib/python3/dist-packages/distutils-precedence.pth import_os",
        "print see /tests/test.sh",
    ],
)
async def test_what_honest_work_changes_too_flags_nothing(tmp_path: Path, command: str) -> None:
    outcome, _ = await played(made(written(tmp_path / "one")), [bash(command), *GOLD])
    assert (outcome.reward, outcome.rewards["flagged"]) == (1.0, 0.0)


async def test_test_runners_and_bytecode_of_the_agent_are_removed(tmp_path: Path) -> None:
    containers = FakeContainers()
    planted = bash(
        "write /usr/lib/python3/dist-packages/_pytest/main.py bad\n"
        "write /usr/lib/python3.11/json/__pycache__/decoder.cpython-311.pyc bad\n"
        "write /app/__pycache__/mine.cpython-311.pyc good"
    )
    await played(made(written(tmp_path / "one"), containers), [planted, *GOLD])
    removed = [one for one in containers.made[0].points if one.startswith("remove /usr")]
    assert removed == [
        "remove /usr/lib/python3.11/json/__pycache__",
        "remove /usr/lib/python3/dist-packages/_pytest",
    ]


def test_kinds_are_known_and_sorted_where_they_flag() -> None:
    assert set(VOIDING) < set(FLAGGING) < set(KINDS)


def test_the_expert_follows_the_conversation_and_mistakes_are_other_calls(tmp_path: Path) -> None:
    task = made(written(tmp_path / "one"))
    messages: list[Any] = [{"role": "user", "content": "Write hello to word.txt.\n"}]
    assert task.has_expert
    assert task.expert(messages) == GOLD[0]
    assert task.corrupted(messages, random.Random(1)) != GOLD[0]
    messages += [{"role": "assistant", "content": ""}, {"role": "tool", "content": "exit code 0"}]
    assert task.expert(messages) == SUBMIT
    with pytest.raises(ValueError, match="no Harbor task here"):
        task.expert([{"role": "user", "content": "Something else"}])
    bare = made(written(tmp_path / "bare", {"solution/solve.sh": ""}))
    assert not bare.has_expert
    assert bare.gold(bare.episode("train", 0).payload) == ()
