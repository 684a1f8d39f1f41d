"""What a container's files differ in from its image, read from outside; runs nothing of either.

No link is followed, and no name of the container is resolved: folders are walked side by side.
"""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from composer_mesh.plugins.harbor.containers.port import Change, ContainerError

MOST_CHANGES = 200_000
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


def layer_changes(upper: Path, lowers: Sequence[Path]) -> dict[str, Change]:
    """Return the changed paths of an overlay's upper folder; of `lowers` the lowest is first.

    A folder of the image that was removed whole is one path. Raises ContainerError where there are
    more than `MOST_CHANGES`.
    """
    return _bounded(_of_layer(upper, list(reversed(lowers)), ""))


def copy_changes(copy: Path, image: Path) -> dict[str, Change]:
    """Return the changed paths of a container that is a copy of its image."""
    return _bounded(_of_copy(copy, image, ""))


def _bounded(found: Iterator[tuple[str, Change]]) -> dict[str, Change]:
    changes: dict[str, Change] = {}
    for path, how in found:
        changes[path] = how
        if len(changes) > MOST_CHANGES:
            raise ContainerError("backend", f"a container changed over {MOST_CHANGES:,} files")
    return changes


def _of_layer(upper: Path, lowers: list[Path], at: str) -> Iterator[tuple[str, Change]]:
    """Yield the changes below a folder; `lowers` are the same folder of the image, top first."""
    if _is_opaque(upper):
        for name in sorted({one for lower in lowers for one in _names(lower)} - _names(upper)):
            if _topmost(lowers, name) is not None:
                yield f"{at}/{name}", "removed"
        lowers = []
    for name in sorted(_names(upper)):
        place, below, path = upper / name, _topmost(lowers, name), f"{at}/{name}"
        if _is_whiteout(place):
            if below is not None:
                yield path, "removed"
        elif _is_folder(place):
            if below is not None and not _is_folder(below):
                yield path, "changed"
            yield from _of_layer(place, _folders(lowers, name), path)
        else:
            yield from _of_file(place, below, path)


def _of_copy(copy: Path, image: Path | None, at: str) -> Iterator[tuple[str, Change]]:
    before = set() if image is None else _names(image)
    for name in sorted(before - _names(copy)):
        yield f"{at}/{name}", "removed"
    for name in sorted(_names(copy)):
        place, path = copy / name, f"{at}/{name}"
        below = image / name if image is not None and name in before else None
        if _is_folder(place):
            if below is not None and not _is_folder(below):
                yield path, "changed"
                below = None
            yield from _of_copy(place, below, path)
        else:
            yield from _of_file(place, below, path)


def _of_file(place: Path, below: Path | None, path: str) -> Iterator[tuple[str, Change]]:
    """Yield the change of what is no folder."""
    if below is None:
        yield path, "added"
    elif _differs(place, below):
        yield path, "changed"


def _names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


def _folders(lowers: Sequence[Path], name: str) -> list[Path]:
    """Return the folders of a name that are seen through each other, top first."""
    found = []
    for lower in lowers:
        place = lower / name
        if not os.path.lexists(place):
            continue
        if not _is_folder(place):
            break
        found.append(place)
        if _is_opaque(place):
            break
    return found


def _topmost(lowers: Sequence[Path], name: str) -> Path | None:
    """Return what a name is in the image; None if it is nothing there."""
    for lower in lowers:
        place = lower / name
        if os.path.lexists(place):
            return None if _is_whiteout(place) else place
        if _is_opaque(lower):
            return None
    return None


def _differs(one: Path, other: Path) -> bool:
    """Whether two files that are no folders differ in kind, mode, target or content."""
    first, second = one.lstat(), other.lstat()
    if first.st_mode != second.st_mode:
        return True
    if stat.S_ISLNK(first.st_mode):
        return one.readlink() != other.readlink()
    if not stat.S_ISREG(first.st_mode):
        return first.st_rdev != second.st_rdev
    return first.st_size != second.st_size or not filecmp.cmp(one, other, shallow=False)


def _is_folder(place: Path) -> bool:
    return stat.S_ISDIR(place.lstat().st_mode)


def _is_whiteout(place: Path) -> bool:
    status = place.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(folder: Path) -> bool:
    for name in OPAQUE:
        try:
            if os.getxattr(folder, name, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue  # no such attribute, or not for this user
    return False
