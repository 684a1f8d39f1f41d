"""What a container changed of its image is read from outside, and no link of it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_mesh.plugins.harbor.containers import box_changes
from composer_mesh.plugins.harbor.containers.box_changes import copy_changes, layer_changes
from composer_mesh.plugins.harbor.containers.port import ContainerError


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_a_layer_over_an_image_of_two_layers(tmp_path: Path) -> None:
    low = tree(tmp_path / "low", {"bin/sh": "1", "etc/a": "a", "lib/x/y": "y"})
    top = tree(tmp_path / "top", {"bin/sh": "2", "opt/b": "b"})
    own = {"bin/sh": "3", "etc/a": "a", "etc/new": "n", "opt/b": "c", "lib/x/y/z": "folder"}
    upper = tree(tmp_path / "upper", own)
    assert layer_changes(upper, [low, top]) == {
        "/bin/sh": "changed",
        "/etc/new": "added",
        "/opt/b": "changed",
        "/lib/x/y": "changed",
        "/lib/x/y/z": "added",
    }
    (upper / "bin/sh").write_text("2")
    assert "/bin/sh" not in layer_changes(upper, [low, top])
    (upper / "bin/sh").chmod(0o755)
    assert layer_changes(upper, [low, top])["/bin/sh"] == "changed"


def test_removed_paths_of_a_layer(tmp_path: Path) -> None:
    low = tree(tmp_path / "low", {"bin/sh": "1", "lib/a": "a"})
    upper = tree(tmp_path / "upper", {"bin/other": "1"})
    try:
        os.mknod(upper / "bin/sh", 0o020000, os.makedev(0, 0))
        os.mknod(upper / "bin/never", 0o020000, os.makedev(0, 0))
        os.mknod(upper / "lib", 0o020000, os.makedev(0, 0))
    except PermissionError:
        pytest.skip("only root makes the marks of removed files")
    assert layer_changes(upper, [low]) == {
        "/bin/sh": "removed",
        "/lib": "removed",
        "/bin/other": "added",
    }
    assert layer_changes(tree(tmp_path / "two", {"bin/sh": "1"}), [low, upper]) == {
        "/bin/sh": "added"
    }


def test_a_copy_of_an_image(tmp_path: Path) -> None:
    image = tree(tmp_path / "image", {"bin/sh": "1", "etc/a": "a", "lib/x/y": "y", "usr/z": "z"})
    copy = tree(tmp_path / "copy", {"bin/sh": "2", "etc/a": "a", "etc/new": "n", "lib/x": "file"})
    assert copy_changes(copy, image) == {
        "/bin/sh": "changed",
        "/etc/new": "added",
        "/lib/x": "changed",
        "/usr": "removed",
    }


@pytest.mark.parametrize("layered", [True, False])
def test_links_are_compared_and_not_followed(tmp_path: Path, layered: bool) -> None:
    secret = tree(tmp_path / "secret", {"file": "1"})
    image, own = tmp_path / "image", tmp_path / "own"
    for folder in (image, own):
        folder.mkdir()
        (folder / "same").symlink_to("/nowhere")
    (image / "lib").symlink_to(secret)
    (image / "moved").symlink_to("/one")
    (own / "moved").symlink_to("/two")
    tree(own, {"lib/file": "1"})
    found = layer_changes(own, [image]) if layered else copy_changes(own, image)
    assert found == {"/moved": "changed", "/lib": "changed", "/lib/file": "added"}


def test_a_container_that_changes_too_much_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_changes, "MOST_CHANGES", 2)
    upper = tree(tmp_path / "upper", {str(n): "" for n in range(4)})
    with pytest.raises(ContainerError, match="changed over 2 files"):
        layer_changes(upper, [tree(tmp_path / "low", {"a": ""})])
