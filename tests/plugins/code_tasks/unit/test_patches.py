"""Unified diffs, and how results of tools are cut."""

from __future__ import annotations

import difflib
import random

import pytest

from composer_mesh.plugins.code_tasks.texts import (
    PatchFailed,
    apply_hunks,
    cut,
    numbered,
    read_patch,
    syntax_error,
)


def diff_of(before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.split("\n"), after.split("\n"), "a/x.py", "b/x.py", "", "", 2
    )
    return "\n".join(line.rstrip("\n") for line in lines)


@pytest.mark.parametrize("seed", range(20))
def test_a_diff_gives_the_text_that_it_was_made_from(seed: int) -> None:
    chance = random.Random(seed)
    before = [f"line {chance.randrange(9)}" for _ in range(30)]
    after = [line for line in before if chance.random() > 0.2]
    for _ in range(4):
        after.insert(chance.randrange(len(after)), f"new {chance.random()}")
    text, wanted = "\n".join(before) + "\n", "\n".join(after) + "\n"
    (file,) = read_patch(diff_of(text, wanted))
    assert apply_hunks(text, file.hunks) == wanted
    assert (file.old, file.new) == ("x.py", "x.py")


def test_a_hunk_is_found_where_the_line_numbers_are_wrong() -> None:
    (file,) = read_patch("--- a/x.py\n+++ b/x.py\n@@ -90,2 +90,2 @@\n b\n-c\n+d\n")
    assert apply_hunks("a\nb\nc\n", file.hunks) == "a\nb\nd\n"


def test_files_are_made_and_removed_by_a_diff() -> None:
    made, gone = read_patch(
        "diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n"
        "@@ -0,0 +1,2 @@\n"
        "+x = 1\n+y = 2\n--- a/o.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-z = 1\n"
    )
    assert (made.old, made.new, gone.old, gone.new) == (None, "n.py", "o.py", None)
    assert apply_hunks("", made.hunks) == "x = 1\ny = 2\n"


@pytest.mark.parametrize(
    "diff", ["", "hello", "--- a/x\n+++ b/x\n", "@@ -1 +1 @@\n-a\n+b\n", "--- a\n+++ b\nwhat\n"]
)
def test_what_is_no_diff_is_refused(diff: str) -> None:
    with pytest.raises(PatchFailed):
        read_patch(diff)


def test_a_hunk_that_fits_nowhere_is_refused() -> None:
    (file,) = read_patch("--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n b\n-c\n+d\n")
    with pytest.raises(PatchFailed, match="hunk 1"):
        apply_hunks("a\nb\n", file.hunks)


def test_a_hunk_of_equal_lines_is_applied_at_the_nearest_place() -> None:
    hunk = "--- a/f\n+++ b/f\n@@ -{} +1 @@\n-a\n a\n"
    for line, left in ((1, "axaa"), (3, "aax")):
        (file,) = read_patch(hunk.format(line))
        text = "\n".join("aaxaa" if line == 1 else "aaax")
        assert apply_hunks(text, file.hunks) == "\n".join(left)


def test_a_diff_of_more_hunks_than_a_file_has_room_for_is_refused() -> None:
    (file,) = read_patch("--- a/f\n+++ b/f\n" + "@@ -1 +1 @@\n-a\n" * 20)
    with pytest.raises(PatchFailed, match="20 hunks for 1,000,001 lines: join hunks"):
        apply_hunks("a\n" * 1_000_000, file.hunks)


def test_a_cut_text_has_its_begin_its_end_and_what_is_missing() -> None:
    text = "a" * 3000 + "b" * 3000
    short = cut(text, 900)
    assert short.startswith("a" * 300 + "\n[5,100 characters are left out here]\n")
    assert short.endswith("b" * 600)
    assert cut(text, 6000) == text


def test_lines_are_numbered_and_the_rest_is_told() -> None:
    assert numbered("a\nb\nc\nd\n", 2, 2) == "    2  b\n    3  c\n[1 more lines]"
    assert numbered("a\n", 7, 2) == ""


def test_a_syntax_error_is_told_with_its_line() -> None:
    found = syntax_error("x.py", "a = 1\nif a\n    b\n")
    assert found is not None
    assert found[0] == 2
    assert syntax_error("x.py", "a = 1\n") is None
    assert syntax_error("x.txt", "if a") is None


def test_a_later_hunk_is_placed_by_what_the_earlier_ones_have_moved() -> None:
    """The line `x` is there twice, and the first one has moved to where the second one was."""
    diff = "--- a/x.py\n+++ b/x.py\n@@ -1 +1,3 @@\n a\n+n\n+n\n@@ -4 +6 @@\n-x\n+y\n"
    (file,) = read_patch(diff)
    assert apply_hunks("a\nx\nb\nx\n", file.hunks) == "a\nn\nn\nx\nb\ny\n"
