"""`composer-mesh islands`: what it starts, refuses and sums up; its launcher runs nothing.

The section [islands]: what is refused, with its repair; what may change on a resume.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_islands import PRESET, ends_of
from pydantic import ValidationError

from composer_mesh.configs.changes import changes
from composer_mesh.configs.islands import IslandsConfig, OuterAdam, OuterSgd
from composer_mesh.configs.load import load_config
from composer_mesh.plugins.islands.jobs.by_launch import LaunchExecutor
from composer_mesh.plugins.islands.jobs.command import configs_of, replicas_of
from composer_mesh.plugins.islands.jobs.directory import IslandsDirectory, islands_in, summarize
from composer_mesh.plugins.islands.jobs.ports import IslandReplica, IslandState
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.cli import main
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.status import RunStatus, write_status
from composer_mesh.services.launch.ports import (
    Handle,
    LaunchFailed,
    OnlyTheController,
    Order,
    Plan,
    State,
)


class FakeLauncher(OnlyTheController):
    """Accepts runs and tells the state that a test gives them; the third is refused if asked."""

    def __init__(self, refused: str = "") -> None:
        self.states: dict[str, State] = {}
        self.stopped_runs: list[str] = []
        self._refused = refused

    def plan(self, order: Order) -> Plan:
        return Plan(commands=[["train", str(order.output), *["--resume"] * order.resume]])

    def submit(self, order: Order, plan: Plan) -> Handle:
        if order.output.name == self._refused:
            raise LaunchFailed("no room")
        self.states[order.output.name] = "running"
        log = order.output / "launch" / "controller.log"
        log.write_text("first\nValueError: too large\n")
        return Handle("local", order.output, "1@1", order.python, order.folder, log=log)

    def reach(self, handle: Handle) -> tuple[str, ...]:
        return ()

    def state(self, handle: Handle) -> tuple[State, str]:
        return self.states[handle.run.name], "process 1"

    def follow(self, handle: Handle) -> Iterator[str]:
        return iter([])

    def stop(self, handle: Handle, grace_s: float) -> None:
        self.stopped_runs.append(handle.run.name)
        self.states[handle.run.name] = "ended"


def asked(tmp_path: Path, **changes: Any) -> Namespace:
    known = {
        "config": [PRESET],
        "set": [],
        "n": 2,
        "store": f"file://{tmp_path}/store",
        "lighthouse": None,
        "output": tmp_path / "all",
        "resume": False,
        "only": None,
    }
    return Namespace(**known | changes)


def replicas(tmp_path: Path, **changes: Any) -> list[IslandReplica]:
    arguments = asked(tmp_path, **changes)
    place = IslandsDirectory(tmp_path / "all", arguments.store, arguments.n)
    return replicas_of(configs_of(arguments), place, arguments)


def started(tmp_path: Path, launcher: FakeLauncher) -> tuple[LaunchExecutor, list[IslandReplica]]:
    executor, found = LaunchExecutor(lambda _: launcher), replicas(tmp_path)
    executor.launch_replicas(found)
    return executor, found


def ended(run: Path, state: str) -> None:
    status = RunStatus(1, None, state, 3, 3, 3, "shm")
    write_status(run, status)


def test_islands_differ_in_rank_and_name_only(tmp_path: Path) -> None:
    one, two = (replica.config for replica in replicas(tmp_path))

    assert [one.islands.rank, two.islands.rank, one.islands.world_size] == [0, 1, 2]
    assert [one.run.name, two.run.name] == ["quickstart-0", "quickstart-1"]
    same = two.model_copy(update={"run": one.run, "islands": one.islands})
    assert same == one


def test_each_island_may_have_a_config_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(PRESET.read_text().replace("steps = 70", "steps = 30"))

    found = replicas(tmp_path, config=[PRESET, other])

    assert [one.config.run.steps for one in found] == [70, 30]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n": 0}, "-n is 0 but must be"),
        ({"n": 3, "config": [PRESET, PRESET]}, "-n is 3 but 2 configs are given"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        replicas(tmp_path, **changes)


def test_a_directory_with_runs_is_not_written_over(tmp_path: Path) -> None:
    run = tmp_path / "all" / "island-1"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("")

    with pytest.raises(RunDirectoryError):
        replicas(tmp_path)


def test_one_island_alone_may_be_started(tmp_path: Path) -> None:
    assert [one.rank for one in replicas(tmp_path, only=1)] == [1]


def test_a_dry_run_prints_every_island_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["islands", str(PRESET), "-n", "2", "--store", f"file://{tmp_path}/store"]

    assert main([*words, "--output", str(tmp_path / "all"), "--dry-run"]) == 0

    out = capsys.readouterr().out
    assert "# island 0" in out
    assert f"--output {tmp_path}/all/island-1" in out
    assert not list(tmp_path.iterdir())


def test_an_address_that_is_none_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["islands", str(PRESET), "-n", "2", "--store", "ftp://host/x"]

    assert main([*words, "--output", str(tmp_path / "all")]) == 2

    assert "must begin with one of file://, s3://" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (["--lighthouse", "http://127.0.0.1:9"], "does not answer"),
        (["--lighthouse", "127.0.0.1:9"], "must be http://HOST:PORT"),
    ],
)
def test_a_lighthouse_that_is_none_is_refused_before_anything_starts(
    where: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["islands", str(PRESET), "-n", "2", *where, "--output", str(tmp_path / "all")]

    assert main(words) == 2

    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [[], ["--store", "file:///x", "--lighthouse", "http://h:1"]])
def test_islands_meet_in_exactly_one_way(where: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["islands", str(PRESET), "-n", "2", *where])
    assert ended.value.code == 2


def test_other_islands_of_a_directory_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all").mkdir()
    IslandsDirectory(tmp_path / "all", "s3://bucket/x", 4).write()
    words = ["islands", str(PRESET), "-n", "2", "--store", f"file://{tmp_path}/store"]

    assert main([*words, "--output", str(tmp_path / "all")]) == 2

    assert "has 4 islands that meet in s3://bucket/x" in capsys.readouterr().err


def test_a_failed_island_is_told_with_its_cause(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    executor, _ = started(tmp_path, launcher)
    assert [one.state for one in executor.poll()] == ["running", "running"]

    launcher.states = {"island-0": "ended", "island-1": "ended"}
    ended(tmp_path / "all" / "island-0", "finished")
    one, two = ends_of(executor)

    assert (one.state, one.cause) == ("finished", "")
    assert (two.state, two.cause) == ("failed", "first / ValueError: too large")


def test_the_event_of_a_failure_is_its_cause(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    executor, (one, two) = started(tmp_path, launcher)
    launcher.states = {"island-0": "ended", "island-1": "ended"}
    for replica in (one, two):
        ended(replica.output, "failed")
        event = {"time": 1.0, "event": "run_failed", "actor": "", "detail": "the disk is full"}
        (replica.output / "events.jsonl").write_text(json.dumps(event) + "\n")

    assert {state.cause for state in ends_of(executor)} == {"the disk is full"}


def test_an_island_that_is_not_accepted_ends_those_that_are(tmp_path: Path) -> None:
    launcher = FakeLauncher(refused="island-1")

    with pytest.raises(LaunchFailed, match="no room"):
        started(tmp_path, launcher)
    assert launcher.stopped_runs == ["island-0"]


def test_a_cancel_ends_living_islands_only(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    executor, _ = started(tmp_path, launcher)
    launcher.states["island-0"] = "ended"

    executor.cancel(1.0)

    assert launcher.stopped_runs == ["island-1"]


def test_the_summary_adds_up_all_islands(tmp_path: Path) -> None:
    place = IslandsDirectory(tmp_path, "file:///x", 2)
    for rank, success in enumerate((0.5, 0.7)):
        run = place.run(rank)
        run.mkdir()
        step = {
            "rollouts/count": 8,
            "islands/round": 3,
            "islands/bytes_sent": 10,
            "islands/lost": rank,
        }
        times = {"time/islands_s": 1.0, "time/step_s": 10.0}
        (run / "metrics.jsonl").write_text(json.dumps({**step, **times}) + "\n")
        final = {"success": success, "episodes": 10}
        (run / "summary.json").write_text(json.dumps({"eval": {"initial": None, "final": final}}))
    states = [IslandState(0, "finished", 1), IslandState(1, "failed", 1, "why")]

    summary = summarize(place, states, 9.0)

    assert summary["eval"] == {"initial": None, "final": {"success": 0.6, "episodes": 20}}
    assert (summary["islands"], summary["finished"], summary["rollouts"]) == (2, 1, 16)
    assert (summary["round"], summary["lost"], summary["bytes_sent"]) == (3, 1, 20)
    assert summary["time_communicating"] == pytest.approx(0.1)
    assert summary["each"][1]["cause"] == "why"


def test_a_directory_tells_its_islands(tmp_path: Path) -> None:
    place = IslandsDirectory(tmp_path, "s3://bucket/x", 3)
    assert islands_in(tmp_path) is None

    place.write()

    assert islands_in(tmp_path) == place
    assert [run.name for run in place.runs] == ["island-0", "island-1", "island-2"]


def test_a_directory_tells_its_lighthouse(tmp_path: Path) -> None:
    place = IslandsDirectory(tmp_path, "http://10.0.0.1:29510", 3, "lighthouse")
    place.write()
    assert islands_in(tmp_path) == place


def test_islands_of_a_lighthouse_get_its_address(tmp_path: Path) -> None:
    address = "http://localhost:29510"
    (one, two) = configs_of(asked(tmp_path, store=None, lighthouse=address))
    assert {one.islands.lighthouse, two.islands.lighthouse} == {address}
    assert (one.islands.store, one.islands.rank, two.islands.rank) == (None, 0, 1)


def test_a_damaged_file_of_islands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "islands.json").write_text("[]")

    with pytest.raises(RunDirectoryError, match="does not say where its islands are"):
        islands_in(tmp_path)


def test_islands_of_the_preset_play_different_prompts() -> None:
    from composer_mesh.rollouts.curriculum import EpisodeOrder

    config = load_config(PRESET)
    assert not config.islands.on
    orders = [EpisodeOrder(rank, 3) for rank in range(3)]
    played = sorted(order.choose(group, 0) for order in orders for group in range(4))
    assert played == list(range(12))


@pytest.mark.parametrize("how", [["ablate"], ["train", "--rollout-only"]])
def test_commands_whose_runs_train_apart_refuse_a_store(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = how
    store = f"islands.store=file://{tmp_path}/store"

    assert main([command, str(PRESET), "--set", store, *options]) == 2

    assert "islands.store is 'file://" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


STORE = {"store": "s3://bucket/run"}
LIGHTHOUSE = {"lighthouse": "http://10.0.0.1:29510"}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"store": "/shared"}, "must begin with one of file://, s3://, gs://, az://"),
        ({"store": "s3://key:secret@bucket"}, "credentials or options in its address"),
        ({"rank": 2, "world_size": 2}, "give a rank from 0 to 1"),
        ({"quorum": 3, "world_size": 2}, "no round could ever close"),
        ({"steps_per_round": 4, "overlap_steps": 4}, "lower overlap_steps to 3 or less"),
        ({"steps_per_round": 4, "fragments": 3}, "make steps_per_round a multiple of fragments"),
        (STORE | LIGHTHOUSE, "store and lighthouse are both set"),
        ({"lighthouse": "10.0.0.1:29510"}, "must be http://HOST:PORT"),
        ({"lighthouse": "http://10.0.0.1"}, "must be http://HOST:PORT"),
        ({"lighthouse": "http://10.0.0.1:x"}, "must be http://HOST:PORT"),
        ({"lighthouse": "https://10.0.0.1:29510"}, "must be http://HOST:PORT"),
        (
            LIGHTHOUSE | {"max_staleness": 3},
            "max_staleness is 3 but is a rule of rounds in a store",
        ),
        (LIGHTHOUSE | {"absent_after": 3}, "absent_after is 3"),
        (LIGHTHOUSE | {"rounds_kept": 3}, "rounds_kept is 3"),
        (
            LIGHTHOUSE | {"steps_per_round": 4, "fragments": 2, "overlap_steps": 2},
            "lower overlap_steps to 1 or less",
        ),
        (LIGHTHOUSE | {"world_size": 2}, "set host to this machine's address"),
        (LIGHTHOUSE | {"host": "::1"}, "host"),
        ({"host": "10.0.0.2"}, "only islands with a lighthouse listen"),
        (STORE | {"host": "10.0.0.2"}, "only islands with a lighthouse listen"),
    ],
)
def test_what_does_not_fit_is_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        IslandsConfig.model_validate(table)


def test_the_outer_optimizer_is_that_of_diloco_unless_another_is_named() -> None:
    assert IslandsConfig().outer == OuterSgd(lr=0.7, momentum=0.9, nesterov=True)
    adam = IslandsConfig.model_validate({"outer": {"type": "adam"}}).outer
    assert isinstance(adam, OuterAdam)


def test_a_run_without_a_store_is_no_island() -> None:
    assert not IslandsConfig().on
    assert IslandsConfig().longest_wait_s == 0
    assert IslandsConfig.model_validate(STORE).on


def test_islands_may_meet_by_a_lighthouse() -> None:
    found = IslandsConfig.model_validate(LIGHTHOUSE | {"host": "10.0.0.2", "fragments": 2})
    assert found.on
    assert found.address == LIGHTHOUSE["lighthouse"]
    one = IslandsConfig.model_validate(STORE)
    assert found.longest_wait_s == 3 * one.longest_wait_s
    again = IslandsConfig.model_validate(found.model_dump())
    assert again == found


def test_the_way_to_meet_is_part_of_a_run_and_its_address_is_not(build_config: Any) -> None:
    before = build_config(islands=LIGHTHOUSE)
    moved = build_config(islands={"lighthouse": "http://10.0.0.9:29510", "host": "10.0.0.8"})
    assert all(one.safe for one in changes(before, moved))
    assert not all(one.safe for one in changes(before, build_config(islands=STORE)))
    assert not all(one.safe for one in changes(build_config(islands=STORE), before))


def test_patience_may_change_on_a_resume_and_rules_may_not(build_config: Any) -> None:
    before = build_config(islands=STORE)
    after = build_config(
        islands={**STORE, "deadline_s": 5.0, "rounds_kept": 3, "steps_per_round": 2}
    )

    assert {one.key: one.safe for one in changes(before, after)} == {
        "islands.deadline_s": True,
        "islands.rounds_kept": True,
        "islands.steps_per_round": False,
    }
