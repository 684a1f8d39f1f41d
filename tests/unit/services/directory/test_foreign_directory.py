"""Status, lock and lines of a run directory that a stranger has made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.regular_files import UnusableFile
from composer_mesh.services.directory.claim import (
    RunDirectoryError,
    claimed,
    holder,
    locker,
    own_content,
    set_aside,
    sign,
    signature_file,
)
from composer_mesh.services.directory.report import read_evaluations, read_metrics
from composer_mesh.services.directory.status import RunStatus, read_status, write_status
from composer_mesh.services.inspection.events_command import LONGEST_LINE, FollowedLines

HERE = "http://127.0.0.1:4711"


@pytest.mark.parametrize(
    "changes",
    [
        {"admin_url": "http://evil.example:80"},
        {"admin_url": "http://127.0.0.1:1@evil.example:80"},
        {"admin_url": "file:///etc/passwd"},
        {"telemetry_socket": 5},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**40},
        {"pid": "one"},
        {"step": "1e9"},
        {"step": None},
        {"actors": 5},
        {"actors": [{}]},
        {"actors": [{"name": "a", "kind": "b", "pid": -5}]},
        {"hosts": {"a": 1}},
        {"admin_tls": {"certificate": "a", "other": "b"}},
    ],
    ids=str,
)
def test_a_status_with_other_fields_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_status(
        tmp_path, RunStatus(1, HERE, "train", 1, 2, 1, "shm", telemetry_socket="/run/query")
    )
    path = tmp_path / "status.json"
    fields = json.loads(path.read_text())
    assert read_status(tmp_path) is not None
    path.write_text(json.dumps({**fields, **changes}))
    assert read_status(tmp_path) is None


def test_a_status_that_is_no_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    assert read_status(tmp_path) is None


def test_a_lock_that_leads_to_another_run_names_nobody(tmp_path: Path) -> None:
    mine, planted = tmp_path / "mine", tmp_path / "planted"
    planted.mkdir()
    with claimed(mine):
        (planted / ".lock").symlink_to(mine / ".lock")
        assert (holder(mine), locker(mine)) == (os.getpid(), os.getpid())
        assert (holder(planted), locker(planted)) == (None, None)


@pytest.mark.parametrize("text", ["-1", "0", "99999999999999999999", "", "٣", "1 2", "x" * 100])
def test_a_lock_without_a_process_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / ".lock").write_text(text)
    assert locker(tmp_path) is None


@pytest.mark.parametrize("line", [b"5", b"[]", b"[" * 10_000, b"\xff", b"{"])
def test_a_line_that_is_no_object_is_named_with_its_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl cannot be read"):
        read_metrics(path)
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(RunDirectoryError, match="holds no evaluation"):
        read_evaluations(path)


@pytest.mark.parametrize("changed", ['"success": NaN', '"success": 1.5', '"step": -1'])
def test_an_evaluation_that_cannot_be_is_named_with_its_file(tmp_path: Path, changed: str) -> None:
    """A report as JSON has no number for it, and ended with a traceback."""
    path = tmp_path / "evaluations.jsonl"
    path.write_text(f'{{"step": 0, "success": 0.5, "episodes": 8, {changed}}}\n')
    with pytest.raises(RunDirectoryError, match=r"evaluations\.jsonl holds no evaluation"):
        read_evaluations(path)


def test_a_line_that_is_too_long_is_left_out_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = b"x" * (2 * LONGEST_LINE + 5)
    path.write_bytes(b"a\n" + long + b"\nb\n" + long)
    lines = FollowedLines(path)
    assert list(lines.new()) == ["a", "b"]
    with path.open("ab") as file:
        file.write(b"\nc\n")
    assert list(lines.new()) == ["c"]


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.truncate(2**41)
    with pytest.raises(UnusableFile, match="without an end"):
        list(FollowedLines(path).new())


CONTENT = b"[run]\nname = 'mine'\n"


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "config.toml"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    sign(path, CONTENT)
    assert own_content(path)
    return path


def test_a_signed_file_counts_in_no_folder_to_which_it_was_copied(
    signed: Path, tmp_path: Path
) -> None:
    shutil.copytree(signed.parent, tmp_path / "planted")
    assert not own_content(tmp_path / "planted" / signed.name)
    signed.parent.rename(tmp_path / "moved")
    assert not own_content(tmp_path / "moved" / signed.name)


def test_a_signed_file_counts_under_no_other_name(signed: Path) -> None:
    other = signed.with_name("launch.json")
    shutil.copy(signed, other)
    shutil.copy(signature_file(signed), signature_file(other))
    assert not own_content(other)


def test_name_and_folder_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Parts that would be the same text when joined."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"c")
    sign(tmp_path / "a" / "b", b"c")
    signature = signature_file(tmp_path / "a" / "b").read_bytes()
    (tmp_path / "b").write_bytes(b"c")
    signature_file(tmp_path / "b").write_bytes(signature)
    assert not own_content(tmp_path / "b")


def test_it_does_not_matter_by_which_link_a_folder_is_reached(signed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(signed.parent)
    assert own_content(tmp_path / "link" / signed.name)


def test_a_run_that_is_set_aside_stays_own_and_a_strangers_stays_a_strangers(
    signed: Path, tmp_path: Path
) -> None:
    place = set_aside(signed.parent)
    assert place is not None
    assert own_content(place / signed.name)
    planted = tmp_path / "planted"
    shutil.copytree(place, planted)
    place = set_aside(planted)
    assert place is not None
    assert not own_content(place / signed.name)
