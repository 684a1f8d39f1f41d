"""`verify` says what is damaged, missing, left over or differs, and how it is repaired."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stored_runs import short_run

from composer_mesh.actors.checkpoints.folder import Draft
from composer_mesh.actors.checkpoints.manifest import written
from composer_mesh.actors.sqlite_file import checksum_of
from composer_mesh.configs.schema import Config
from composer_mesh.services.cli import main
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.verification import verify_run


@pytest.fixture
def run(tmp_path: Path, build_config: Any) -> Path:
    config: Config = build_config()
    asyncio.run(short_run(tmp_path / "run", config))
    return tmp_path / "run"


REWARD = (
    "INSERT INTO rewards (trace_id, reward, source, posted, state, step) "
    "VALUES ('{}', 0.5, 'a reviewer', 1.0, {})"
)


def change(run: Path, statement: str) -> None:
    """A change that is sealed: what a fault of a program would do, and none of the disk."""
    with closing(sqlite3.connect(run / "run.sqlite", isolation_level=None)) as rows:
        rows.create_function("seal_of", -1, checksum_of)
        rows.execute(statement)


def checkpoint(run: Path, step: int) -> Path:
    draft = Draft(run, step)
    (draft.folder / "shard").write_bytes(b"tensors")
    return draft.commit(written(draft.folder, [draft.folder / "shard"])).folder


def test_a_whole_run_has_nothing_to_tell(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(run, 1)
    assert main(["verify", str(run)]) == 0
    assert "every file and row is as it was written" in capsys.readouterr().out


def test_each_finding_is_a_line_with_its_repair_and_the_status_is_1(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path_of(run, 0).unlink()
    (checkpoint(run, 1) / "shard").write_bytes(b"tensorz")
    (run / "teachers.sqlite").write_bytes(b"no database")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}\n')
    assert main(["verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["damaged", " teachers.sqlite"],
        ["missing", " traces/000/000000.safetensors"],
        ["differs", " metrics.jsonl"],
        ["damaged", " checkpoints/step-1"],
    ]
    assert all(line.count(": ") >= 3 for line in lines)


def test_json_has_the_same_findings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_of(run, 1).write_bytes(b"")
    assert main(["verify", str(run), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["kind"], found["where"]) == ("damaged", "traces/000/000001.safetensors")
    assert "0 bytes" in found["why"]


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("UPDATE traces SET reward = 7 WHERE trace_id = 'train-000000-000'", "rollout train-"),
        ("DELETE FROM traces WHERE trace_id = 'train-000000-000'", "index of group 0"),
        ("UPDATE groups SET trained = 9 WHERE group_id = 1", "step of group 1"),
        ("UPDATE pairs SET step = 9 WHERE place = 1", "step of pair train-000000-000/a"),
        (REWARD.format("train-000000-000", "'trained', 9"), "step of reward 1"),
        (REWARD.format("train-000077-000", "'waiting', NULL"), "rollout train-000077-000"),
    ],
)
def test_rows_that_contradict_each_other_are_found(run: Path, statement: str, where: str) -> None:
    change(run, statement)
    (found,) = verify_run(run)
    assert found.where.startswith(where)


def test_a_directory_without_a_store_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "has no run.sqlite" in capsys.readouterr().err
