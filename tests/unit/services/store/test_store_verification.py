"""`verify` says what is damaged, missing, left over or differs, and how it is repaired."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stored_runs import short_run

from composer_mesh.actors.checkpoints.folder import CheckpointDraft
from composer_mesh.actors.checkpoints.manifest import written
from composer_mesh.actors.sqlite_file import checksum_of
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.tasks import Episode, PoisonedInput
from composer_mesh.services.cli import main
from composer_mesh.services.directory.report import write_summary
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.verification import verify_run
from composer_mesh.services.store.writing import RunStore


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
    draft = CheckpointDraft(run, step)
    (draft.folder / "shard").write_bytes(b"tensors")
    return draft.commit(written(draft.folder, [draft.folder / "shard"])).folder


def test_a_whole_run_has_nothing_to_tell(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(run, 1)
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert (
        "events.jsonl, timeline.jsonl, config.toml, hint_templates.json, summary.json are" in said
    )
    assert "not checked: logs, status" in said


FLIPPED = (
    *("config.toml", "evaluations.jsonl", "metrics.jsonl", "poisoned.jsonl", "events.jsonl"),
    *("timeline.jsonl", "summary.json", "hint_templates.json"),
)


def finished(root: Path, config: Config) -> None:
    """Write all kinds of files that a run writes besides groups and checkpoints."""
    with RunStore(root, config) as store:
        store.add_event("a", "b", "c", {"d": 1})
        store.add_timeline({"step": 1})
        asyncio.run(store.keep_hint_templates({"lost": "Look for {item}."}))
        store.add_poisoned(PoisonedInput(Episode("toolbox", "train", 1), "kind", "why", "", 2))
    write_summary(root, wall_s=1.0, configured=["policy"])


@pytest.mark.parametrize("name", FLIPPED)
def test_each_flipped_bit_of_a_file_is_found(name: str, run: Path, build_config: Any) -> None:
    finished(run, build_config())
    assert verify_run(run) == []
    content = (run / name).read_bytes()
    step = max(1, len(content) // 16)
    for place in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        (run / name).write_bytes(flipped)
        assert verify_run(run), (name, place)
    (run / name).write_bytes(content[:-1])
    assert verify_run(run)
    (run / name).unlink()
    assert verify_run(run)


def test_another_value_in_the_file_of_checksums_is_found(run: Path, build_config: Any) -> None:
    name = "checksums.json"
    finished(run, build_config())
    content = (run / name).read_text()
    for one in re.findall(r'[^\s{}":,]+', content):
        (run / name).write_text(content.replace(one, f"{one[:-1]}{'1' if one[-1] != '1' else '2'}"))
        assert verify_run(run), one
    for broken in ("", "[]", "{", '{"a": 1}', "[" * 100_000):
        (run / name).write_text(f"{broken}\n")
        assert verify_run(run), broken


def test_a_resume_goes_on_from_the_checksums_and_hides_no_damage(
    run: Path, build_config: Any
) -> None:
    finished(run, build_config())
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "written, and killed before its checksum"}\n')
    assert verify_run(run) == []
    finished(run, build_config())
    assert verify_run(run) == []
    content = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(content.replace(b"killed", b"Killed"))
    (found,) = verify_run(run)
    finished(run, build_config())
    assert [one.where for one in verify_run(run)] == [found.where] == ["events.jsonl"]


def test_a_run_of_an_earlier_version_has_no_checksums_and_gets_them_when_it_is_resumed(
    run: Path, build_config: Any
) -> None:
    finished(run, build_config())
    (run / "checksums.json").unlink()
    assert verify_run(run) == []
    finished(run, build_config())
    assert verify_run(run) == []
    (run / "timeline.jsonl").write_bytes(b"")
    assert [one.where for one in verify_run(run)] == ["timeline.jsonl"]


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


def test_a_link_that_leads_out_of_the_run_is_the_finding_and_is_not_followed(
    run: Path, tmp_path: Path
) -> None:
    checkpoint(run, 1)
    (run / "latest").symlink_to("checkpoints")
    assert verify_run(run) == []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / path_of(run, 0).name).write_bytes(path_of(run, 0).read_bytes())
    (run / "traces" / "late").symlink_to(elsewhere)
    (found,) = verify_run(run)
    assert (found.kind, found.where) == ("damaged", "traces/late")
    assert "leads out of the directory, so nothing was checked: remove the link" in str(found)
