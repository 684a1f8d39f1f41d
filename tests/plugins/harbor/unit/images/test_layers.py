"""Layers applied to a folder: what they mean, and what hostile ones do not get."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_images import layer, member

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images.layers import Root

Apply = Callable[..., Path]
LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.fixture
def applied(tmp_path: Path) -> Apply:
    """Applies layers to a new root; returns it."""

    def apply(*layers: bytes, **bounds: int) -> Path:
        folder = tmp_path / "root"
        folder.mkdir()
        root = Root(folder, None, **bounds)
        try:
            for one in layers:
                root.apply(io.BytesIO(one))
        finally:
            root.close()
        return folder

    return apply


def files(folder: Path) -> dict[str, bytes]:
    return {
        one.relative_to(folder).as_posix(): one.read_bytes()
        for one in sorted(folder.rglob("*"))
        if one.is_file() and not one.is_symlink()
    }


LOWER = layer(("d", None), ("d/a", b"low"), ("d/b", b"low"), ("d/e/f", b"low"), ("g", b"low"))


def test_whiteouts_hide_lower_layers_only(applied: Apply) -> None:
    upper = layer(("d/a", b"new"), ("d/.wh.a", b""), (".wh.g", b""), ("d/.wh.e", b""))
    assert files(applied(LOWER, upper)) == {"d/a": b"new", "d/b": b"low"}


@pytest.mark.parametrize("first", [True, False])
def test_an_opaque_folder_keeps_what_its_layer_adds_in_any_order(
    applied: Apply, first: bool
) -> None:
    mark, entry = ("d/.wh..wh..opq", b""), ("d/e/new", b"new")
    upper = layer(mark, entry) if first else layer(entry, mark)
    assert files(applied(LOWER, upper)) == {"d/e/new": b"new", "g": b"low"}


def test_files_folders_and_links_replace_each_other(applied: Apply) -> None:
    upper = layer(("d", b"now a file"), member("g", tarfile.DIRTYPE, mode=0o711), ("g/h", b"in"))
    root = applied(LOWER, upper, layer(member("g", LINK, "d")))
    assert files(root) == {"d": b"now a file"}
    assert (root / "g").readlink() == Path("d")


def test_modes_times_and_links_are_those_of_the_archive(applied: Apply) -> None:
    entry = tarfile.TarInfo("program")
    entry.mode, entry.mtime = 0o4755, 1234
    kept = member("closed", tarfile.DIRTYPE, mode=0o500, mtime=99)
    hard = member("other", HARD, "program", mode=0o600)
    root = applied(layer(kept, ("closed/in", b"x"), entry, hard, member("l", LINK, "/bin")))
    found = (root / "program").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime, found.st_nlink) == (0o4755, 1234, 2)
    closed = (root / "closed").stat()
    assert (stat.S_IMODE(closed.st_mode), closed.st_mtime) == (0o500, 99)
    assert os.readlink(root / "l") == "/bin"  # noqa: PTH115 as it was written


def test_entries_below_a_link_follow_it_inside_of_the_root(applied: Apply) -> None:
    lower = layer(("usr/lib", None), member("lib", LINK, "/usr/lib"))
    assert files(applied(lower, layer(("lib/new", b"x")))) == {"usr/lib/new": b"x"}


def test_devices_and_attributes_are_left_out_and_counted(tmp_path: Path) -> None:
    device = member("null", tarfile.CHRTYPE, devmajor=1, devminor=3)
    named = tarfile.TarInfo("file")
    named.pax_headers = {"SCHILY.xattr.user.x": "y"}
    root = Root(tmp_path, None)
    root.apply(io.BytesIO(layer(device, named)))
    root.close()
    assert (root.left_out.devices, root.left_out.attributes) == (1, 1)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


OUT = "../" * 9
ESCAPES: dict[str, list[Any]] = {
    "a name upwards": [(f"{OUT}outside/got", b"x")],
    "a name upwards from below": [(f"a/b/{OUT}outside/got", b"x")],
    "an absolute name": [("/outside/got", b"x")],
    "below an absolute link": [member("l", LINK, "@/outside"), ("l/got", b"x")],
    "below a link upwards": [member("l", LINK, f"{OUT}@/outside"), ("l/got", b"x")],
    "over a link": [member("l", LINK, "@/outside/got"), ("l", b"x")],
    "a hard link to outside": [member("l", HARD, "@/outside/secret"), ("l", b"x")],
    "a hard link by a link": [
        member("l", LINK, "@/outside"),
        member("h", HARD, "l/secret"),
        ("h", b"x"),
    ],
    "a hard link to a link": [
        member("l", LINK, "@/outside/secret"),
        member("h", HARD, "l"),
        ("h", b"x"),
    ],
    "links of links": [
        member("a", LINK, "b"),
        member("b", LINK, "@"),
        ("a/outside/got", b"x"),
    ],
    "a whiteout upwards": [("a/.wh...", b"")],
    "a whiteout below a link": [member("l", LINK, "@/outside"), ("l/.wh.secret", b"")],
    "opaque below a link": [member("l", LINK, "@/outside"), ("l/.wh..wh..opq", b"")],
    "a folder over a link": [member("l", LINK, "@/outside"), ("l", None), ("l/got", b"x")],
    "the magic links of proc": [member("l", LINK, "/proc/self/root"), ("l/outside/got", b"x")],
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_gets_out_of_the_root(applied: Apply, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    entries = []
    for one in ESCAPES[name]:
        if isinstance(one, tarfile.TarInfo):
            one = member(one.name, one.type, one.linkname.replace("@", str(tmp_path)))
        entries.append(one)
    try:
        applied(layer(*entries))
    except ContainerError as error:
        assert error.kind == "image_invalid"  # noqa: PT017 either is right, by the attack
    assert files(outside) == {"secret": b"secret"}
    assert (outside / "secret").stat().st_nlink == 1


BROKEN = {
    "cut off": LOWER[:1500],
    "no archive": b"\1" * 4096,
    "too deep": layer(("a/" * 300 + "b", b"")),
    "a name with NUL": layer(member("a", LINK, "b", pax_headers={"linkpath": "b\0c"})),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layer_is_an_invalid_image(applied: Apply, name: str) -> None:
    with pytest.raises(ContainerError, match="image_invalid"):
        applied(BROKEN[name])


def test_entries_and_bytes_are_bounded(tmp_path: Path) -> None:
    for bounds in ({"most_entries": 3}, {"most_bytes": 8}):
        root = Root(tmp_path, None, **bounds)
        with pytest.raises(ContainerError, match="more than"):
            root.apply(io.BytesIO(LOWER))
        root.close()


def test_a_header_that_does_not_fit_is_refused(applied: Apply) -> None:
    long = member("././@PaxHeader", tarfile.XHDTYPE, size=1 << 34)
    with pytest.raises(ContainerError, match=r"header of 17,179,869,184 bytes"):
        applied(long.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
