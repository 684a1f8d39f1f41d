"""A command about a run whose controller is elsewhere runs there, or says why it cannot."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from fake_programs import FakePrograms, fake_programs

from composer_mesh.mesh.machine import this_host
from composer_mesh.services.cli import main
from composer_mesh.services.commands.parser import make_parser
from composer_mesh.services.directory.resume import THERE, called, resume_command
from composer_mesh.services.directory.status import RunStatus, RunUnavailable, write_status
from composer_mesh.services.launch.by_ssh import HostsLauncher
from composer_mesh.services.launch.handle import (
    command_there,
    elsewhere,
    reached,
    write_handle,
)
from composer_mesh.services.launch.ports import Handle, State


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(THERE, raising=False)
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    return fake_programs(tmp_path / "bin of fakes", monkeypatch)


@pytest.fixture
def far(folder: Path, fakes: FakePrograms) -> Handle:
    """A run on a host that ssh reaches, which is this one behind a fake; process 1 is there."""
    fakes.ssh()
    there = folder / "it's there"
    there.mkdir()
    where = {"destination": "me@far", "options": ("-x",)}
    handle = Handle(
        "hosts", there / "its run", "1", str(fakes.prints()), there, folder / "log", **where
    )
    write_handle(folder / "run", handle)
    return handle


def parsed(*words: str) -> argparse.Namespace:
    return make_parser().parse_args(words)


def a_status(host: str, state: str = "running") -> RunStatus:
    return RunStatus(1, None, state, 1, 2, 1, "none", host=host, hostname="node-7")


@pytest.mark.parametrize(
    "words",
    [
        ("tree", "run"),
        ("tree", "--json", "run"),
        ("events", "run", "--follow"),
        ("scale", "run", "generator=2"),
        ("stop", "run", "--now"),
        ("stacks", "run"),
        ("query", "run", "SELECT '$HOME', \"x\" FROM `a`"),
        ("tui", "run"),
        ("traces", "run", "show", "1/0"),
        ("join", "run", "tls://10.0.0.7:1"),
        ("reward", "run", "t", "0.5"),
        ("verify", "run"),
    ],
)
def test_a_command_is_brought_to_the_controller_word_for_word(
    words: tuple[str, ...],
    far: Handle,
    fakes: FakePrograms,
) -> None:
    assert reached(parsed(*words), words) == 0
    where, name, *said = (fakes.folder / "prints.log").read_text().rstrip("\n").split("\n")
    assert (where, name) == (str(far.folder), "run")
    renamed = [str(far.run) if word == "run" else word for word in words]
    assert said == ["-P", "-m", "composer_mesh", *renamed]
    assert fakes.said("ssh")[-1][0] == "-x"
    assert fakes.said("ssh")[-1][-3:-1] == ["me@far", "--"]


def test_its_exit_status_is_ours(far: Handle, fakes: FakePrograms) -> None:
    write_handle(Path("run"), replace(far, python=str(fakes.prints(status=7))))
    assert main(["tree", "run"]) == 7


def test_the_newest_run_is_looked_for_elsewhere_too(
    far: Handle,
    fakes: FakePrograms,
    folder: Path,
) -> None:
    place = folder / "runs" / "one"
    place.mkdir(parents=True)
    write_handle(place, far)
    write_status(place, a_status("another"))
    assert main(["events", "--json"]) == 0
    said = (fakes.folder / "prints.log").read_text().rstrip("\n").split("\n")
    assert said[3:] == ["-m", "composer_mesh", "events", str(far.run), "--json"]


def test_what_was_brought_there_stays_there(far: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THERE, "as/typed")
    assert reached(parsed("tree", "run"), ("tree", "run")) is None
    assert called(Path("/far/run")) == Path("as/typed")
    words = "composer-mesh launch as/typed/launch/config.toml --output as/typed --resume"
    assert resume_command(Path("/far/run")) == words


def test_a_run_whose_controller_is_here_is_looked_into_here(far: Handle) -> None:
    write_status(Path("run"), a_status(this_host()))
    assert reached(parsed("tree", "run"), ("tree", "run")) is None


def test_a_run_that_has_ended_is_read_here(far: Handle) -> None:
    write_handle(Path("run"), replace(far, job="999999999"))
    assert reached(parsed("events", "run"), ("events", "run")) is None


def test_a_controller_elsewhere_without_a_handle_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(folder / "run", a_status("another"))
    assert main(["tree", "run"]) == 1
    err = capsys.readouterr().err
    assert "the controller of run is on node-7" in err
    assert err.count("\n") == 1
    write_status(folder / "run", a_status("another", state="finished"))
    assert elsewhere(folder / "run") is None


def test_a_host_that_cannot_be_reached_is_one_line(
    far: Handle,
    fakes: FakePrograms,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fakes.no_route()
    assert main(["scale", "run", "generator=2"]) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "composer-mesh: " in line]
    assert len(said) == 1
    assert "cannot be reached by ssh -x" in said[0]


def test_a_program_that_is_not_there_is_one_line(
    far: Handle, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(["tree", "run"]) == 1
    assert "not installed here" in capsys.readouterr().err


def test_a_stop_falls_back_on_whoever_started_the_run(
    far: Handle,
    fakes: FakePrograms,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fakes.no_route()
    assert main(["stop", "run"]) == 1
    assert "No route to host" in capsys.readouterr().err
    write_handle(Path("run"), replace(far, destination="", job="1@0", run=Path("run").absolute()))
    assert main(["stop", "run"]) == 1  # nothing of it is there any more
    assert "takes no commands" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reach", "begins"),
    [
        (("ssh", "-x", "far", "--"), ["ssh", "-t", "-x", "far", "--"]),
        (("kubectl", "exec", "pod", "--"), ["kubectl", "exec", "-it", "pod", "--", "sh"]),
        (("bash", "reach.sh"), ["bash", "reach.sh", "sh", "-c"]),
    ],
)
def test_a_terminal_is_asked_for_as_each_program_wants_it(
    folder: Path, reach: tuple[str, ...], begins: list[str]
) -> None:
    handle = Handle("hosts", folder, "1", "python", folder)
    command = command_there(handle, reach, Path("run"), ["tui", "run"], terminal=True)
    assert command[: len(begins)] == begins
    plain = command_there(handle, reach, Path("run"), ["tui", "run"], terminal=False)
    assert len(plain) == len(command) - (reach[0] != "bash")


class Waits(HostsLauncher):
    """A cluster that has no hosts for the run yet."""

    def state(self, handle: Handle) -> tuple[State, str]:
        return "waiting", "PENDING"


def test_a_run_that_waits_says_for_what(far: Handle) -> None:
    with pytest.raises(RunUnavailable, match=r"waits for its hosts \(PENDING\)"):
        reached(parsed("tree", "run"), ("tree", "run"), lambda _: Waits())
    assert reached(parsed("stop", "run"), ("stop", "run"), lambda _: Waits()) is None
