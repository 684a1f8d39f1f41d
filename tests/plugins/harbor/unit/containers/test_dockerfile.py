"""The Dockerfiles that are built without a daemon, and what others are refused by."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images.dockerfile import (
    assignments,
    context_files,
    instructions,
    sources,
    substituted,
)


def read(folder: Path, text: str) -> list[tuple[str, str, int]]:
    (folder / "Dockerfile").write_text(text)
    return [(one.name, one.text, one.line) for one in instructions(folder)]


def test_instructions_join_lines_and_leave_out_comments(tmp_path: Path) -> None:
    text = "# first\nfrom tiny\n\nRUN a && \\\n  # inside\n  b\nENV A=1\n"
    assert read(tmp_path, text) == [("FROM", "tiny", 2), ("RUN", "a &&   b", 4), ("ENV", "A=1", 7)]


@pytest.mark.parametrize(
    "line",
    [
        "ADD a b",
        "VOLUME /x",
        'SHELL ["bash"]',
        "HEALTHCHECK CMD x",
        "ONBUILD RUN x",
        "RUN --mount=type=cache,target=/x y",
        "COPY --from=other a b",
        "RUN <<EOF",
        "# escape=`",
        "RUN",
    ],
)
def test_anything_else_is_refused_by_name_and_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ContainerError, match="line 2") as raised:
        read(tmp_path, f"FROM tiny\n{line}\n")
    assert raised.value.kind == "build"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("$A-${A}x", "1-1x"),
        ("${B:-else}${A:-else}", "else1"),
        ("${A:+then}${B:+then}", "then"),
        (r"\$A", "$A"),
        ("$B", ""),
    ],
)
def test_variables_are_replaced(text: str, found: str) -> None:
    assert substituted(text, {"A": "1"}) == found


def test_both_forms_of_env(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text('ENV A=1 B="x y"\nENV C d e\nENV =1\n')
    first, second, third = instructions(tmp_path)
    assert assignments(first, {}) == {"A": "1", "B": "x y"}
    assert assignments(second, {}) == {"C": "d e"}
    with pytest.raises(ContainerError, match="NAME=VALUE"):
        assignments(third, {})


def test_copy_takes_what_is_in_the_folder_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.txt").write_text("a")
    (tmp_path / "Dockerfile").write_text("COPY d /d\n")
    (step,) = instructions(tmp_path)
    assert sources(step, tmp_path, ["./d/*.txt"]) == [tmp_path / "d/a.txt"]
    assert context_files(step, tmp_path / "d") == {"a.txt": tmp_path / "d/a.txt"}
    for pattern, said in (("../x", "leads out"), ("none*", "matches nothing")):
        with pytest.raises(ContainerError, match=said):
            sources(step, tmp_path, [pattern])
    (tmp_path / "d/link").symlink_to("/etc/passwd")
    with pytest.raises(ContainerError, match="is a link"):
        context_files(step, tmp_path / "d")
