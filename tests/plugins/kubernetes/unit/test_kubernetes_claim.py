"""Which launch a run's directory on a volume belongs to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from composer_mesh.mesh.hosts.roster import ROSTER, Record, announce, read_roster
from composer_mesh.plugins.kubernetes.claim import claim, forget_the_dead, main


def record(name: str, port: int) -> Record:
    return Record(name, f"tls://127.0.0.1:{port}", "python", 1, "boot")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs/quickstart"


def test_a_new_directory_is_taken_and_the_next_pod_of_the_launch_finds_it(run: Path) -> None:
    assert claim(run, "mine", resume=False) == ""
    (run / "config.toml").write_text("")
    assert claim(run, "mine", resume=False) == ""


def test_workers_that_came_first_do_not_make_it_another_runs(run: Path) -> None:
    announce(run / ROSTER, record("gpu-0", 1))
    assert claim(run, "mine", resume=False) == ""


def test_the_directory_of_another_launch_is_refused_unless_it_is_resumed(run: Path) -> None:
    claim(run, "first", resume=False)
    assert "launch with --resume" in claim(run, "second", resume=False)
    assert claim(run, "second", resume=True) == ""
    assert claim(run, "second", resume=False) == ""
    assert "launch with --resume" in claim(run, "first", resume=False)


def test_nothing_is_resumed_where_nothing_is(run: Path) -> None:
    assert "nothing to resume" in claim(run, "mine", resume=True)
    assert not run.exists()


def test_records_of_workers_that_are_gone_are_removed(run: Path) -> None:
    with socket.socket() as lives, socket.socket() as dead:
        lives.bind(("127.0.0.1", 0))
        lives.listen()
        dead.bind(("127.0.0.1", 0))
        announce(run / ROSTER, record("gpu-0", lives.getsockname()[1]))
        announce(run / ROSTER, record("gpu-1", dead.getsockname()[1]))
        assert forget_the_dead(run / ROSTER) == ["gpu-1"]
    assert [one.name for one in read_roster(run / ROSTER)] == ["gpu-0"]


def test_the_program_says_why_and_how_it_ended(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "first"]) == 0
    assert main([str(run), "second"]) == 2
    assert f"composer-mesh: {run} is on the volume already" in capsys.readouterr().err
    assert main([str(run), "second", "--resume"]) == 0
