"""Files that somebody else may have written: nothing is read before its kind and size are known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_mesh.configs.regular_files import UnusableFile, open_regular, read_regular
from composer_mesh.mesh.untrusted_json import parsed_json, refuse_unusual, short_reason


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(UnusableFile, match="at most 4 are read"):
        read_regular(path, 4)


def test_a_sparse_file_of_terabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**41)
    with pytest.raises(UnusableFile, match="at most 1000 are read"):
        read_regular(path, 1000)


def test_what_would_never_end_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "."):
        with (
            pytest.raises(OSError, match=r"not a regular file|Is a directory"),
            open_regular(tmp_path / name),
        ):
            pass
    for name in ("pipe", "link"):
        with pytest.raises(UnusableFile, match="not a regular file"):
            refuse_unusual(tmp_path / name)
    refuse_unusual(tmp_path / "missing")
    refuse_unusual(tmp_path)


def test_a_link_is_followed_only_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 9) == b"x"
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "link", 9, follow=False)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, b"\xff", "", "{"]
)
def test_every_text_that_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        parsed_json(text)
    assert len(short_reason(error.value)) < 300


def test_a_reason_is_one_short_line() -> None:
    assert short_reason(ValueError("a\nb")) == "a"
    assert short_reason(KeyError()) == "KeyError"
    assert len(short_reason(ValueError("x" * 9999))) < 300
