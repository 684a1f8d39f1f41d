"""A signature holds for one content, under one name, in one folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from composer_mesh.services.directory.claim import own_content, set_aside, sign, signature_file

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
