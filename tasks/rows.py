"""Rows of a task from a file: JSON lines, JSON, Parquet, or a folder that `datasets` saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import UnusableTask

Row = Mapping[str, Any]
"""What one episode is made from; JSON can carry it."""


def read_rows(path: Path) -> list[Row]:
    """Read all rows of a file; raise UnusableTask if it has none, or one that is no object."""
    readers = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}
    reader = _dataset if path.is_dir() else readers.get(path.suffix)
    if reader is None:
        raise UnusableTask(
            f"{path} ends in {path.suffix!r}: name a .jsonl, .json or .parquet file, or a folder "
            "that datasets.save_to_disk wrote"
        )
    try:
        rows = list(reader(path))
    except OSError as error:
        raise UnusableTask(f"{path} cannot be read: {error.strerror or error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UnusableTask(f"{path}: row {number} is a {type(row).__name__}, not an object")
    if not rows:
        raise UnusableTask(f"{path} has no rows: give it some")
    return rows


def held_out(
    rows: Sequence[Row], every: int, identity: Callable[[Row], str], path: Path
) -> dict[Split, list[Row]]:
    """Split rows: each `every`-th different one is held out, or those that say so themselves.

    Rows with a column `split` of "train" or "heldout" are split by it. Raises UnusableTask if no
    row is held out.
    """
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(identity(row), row)
    different = list(first.values())
    if all(row.get("split") in ("train", "heldout") for row in different):
        found: dict[Split, list[Row]] = {"train": [], "heldout": []}
        for row in different:
            found["heldout" if row["split"] == "heldout" else "train"].append(row)
    else:
        found = {
            "train": [row for i, row in enumerate(different) if i % every != every - 1],
            "heldout": different[every - 1 :: every],
        }
    for split, those in found.items():
        if not those:
            raise UnusableTask(
                f"{path} has {len(different)} different rows and none is for {split!r} with "
                f"data.heldout_every {every}: give more rows or lower data.heldout_every"
            )
    return found


def _json_lines(path: Path) -> Iterable[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(line, f"{path}: line {number}")


def _json(path: Path) -> Iterable[Any]:
    found = _parsed(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(found, list):
        raise UnusableTask(f"{path} holds a {type(found).__name__}: write a list of objects")
    return found


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableTask(f"{where} is not valid JSON: {error}") from error


def _parquet(path: Path) -> Iterable[Any]:
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise UnusableTask(f"{path} is no Parquet file: {error}") from error


def _dataset(path: Path) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise UnusableTask(
            f"{path} is a folder, which needs the package datasets: pip install datasets"
        ) from None
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise UnusableTask(f"{path} is no folder of datasets.save_to_disk: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        names = {"test": "heldout", "validation": "heldout"}
        return [
            {**row, "split": names.get(split, split)} for split in found for row in found[split]
        ]
    return list(found)
