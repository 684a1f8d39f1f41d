"""Breaks the files of a folder at random, as disks, transfers and strangers do. Asserts nothing."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 10**40, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "\0", "\ud800", "../../../etc/passwd", "/dev/zero", "1e999"),
    *([], {}, [[]], [0], [-1, 5], {"a": {}}, [10**12], "float32", "F32"),
)


class Attack:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


class Breaker:
    """Breaks files with one random generator; `marker` is made if a planted pickle is opened."""

    def __init__(self, rng: random.Random, marker: Path) -> None:
        self._rng, self._attack = rng, pickle.dumps(Attack(marker))

    def break_one(self, folder: Path) -> None:
        """Break one file of a folder, or of a folder below it."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if not paths:
            return
        path = self._rng.choice(paths)
        ways: list[Callable[[Path], None]] = [self._flip, self._cut, self._grow, self._replace]
        ways += [self._plant, self._other_kind, *[self._change_json] * 6]
        self._rng.choice(ways)(path)

    def plant_pickle(self, path: Path) -> None:
        """Put a pickle in place of a file."""
        path.write_bytes(self._attack)

    def _flip(self, path: Path) -> None:
        content = bytearray(path.read_bytes()) or bytearray(1)
        for _ in range(self._rng.randint(1, 8)):
            where = self._rng.randrange(min(len(content), self._rng.choice([16, 400, 10**9])))
            content[where] = self._rng.randrange(256)
        path.write_bytes(content)

    def _cut(self, path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: self._rng.randint(0, len(content))])

    def _grow(self, path: Path) -> None:
        path.write_bytes(path.read_bytes() + self._rng.randbytes(self._rng.randint(1, 100)))

    def _replace(self, path: Path) -> None:
        contents = [b"", b"[" * 50_000, b"\xff\xfe\x00", b"1" * 5000, b"null", self._attack]
        path.write_bytes(self._rng.choice(contents))

    def _plant(self, path: Path) -> None:
        """Put a pickle beside a file, under a name that some reader might open."""
        names = [".metadata", "__0_0.distcp", "pytorch_model.bin", "more.safetensors", "rng.pt"]
        (path.parent / self._rng.choice(names)).write_bytes(self._attack)

    def _other_kind(self, path: Path) -> None:
        path.unlink()
        kind = self._rng.randrange(6)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind > 2:
            path.symlink_to(["/dev/zero", path.name, "/dev/null"][kind - 3])

    def _change_json(self, path: Path) -> None:
        """Change values of JSON, or of the header of safetensors."""
        content = path.read_bytes()
        start = 8 if path.suffix == ".safetensors" else 0
        end = start + int.from_bytes(content[:8], "little") if start else len(content)
        try:
            table = json.loads(content[start:end])
        except (ValueError, RecursionError):
            self._flip(path)
            return
        for _ in range(self._rng.randint(1, 3)):
            table = self._changed(table)
        told = json.dumps(table).encode("utf-8", "surrogatepass")
        length = len(told).to_bytes(8, "little") if start else b""
        path.write_bytes(length + told + content[end:])

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, dict | list) or not value or self._rng.random() < 0.1:
            return deepcopy(self._rng.choice(VALUES))
        key = self._rng.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value, dict) and self._rng.random() < 0.2:
            value[self._rng.choice(["x", "..", "\0", "/dev/zero", "__metadata__"])] = value.pop(key)
        else:
            value[key] = self._changed(value[key])
        return value


_watchers: list[list[str]] = []


def _hook(event: str, values: tuple[Any, ...]) -> None:
    if event in ("pickle.find_class", "os.system", "subprocess.Popen"):
        for found in _watchers:
            found.append(f"{event} {values[:2]}")


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collect what pickles ask for, and the programs that are started."""
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()
