"""Rows of a task from a file or a dataset of a hub, and which of them are held out.

Files are JSON lines, JSON, Parquet, or a folder that `datasets` saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from composer_mesh.configs.hub import HubId, read_path
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import UnusableTask

Row = Mapping[str, Any]
"""What one episode is made from; JSON can carry it."""

COLUMN = "split"
LABELS: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("heldout", "held_out", "holdout", "test", "testing"), "heldout"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development"), "heldout"),
    **dict.fromkeys(("eval", "evaluation"), "heldout"),
}
"""What the values of a column `split` mean, in lower case."""
MOST_LISTED = 10


def read_rows(path: Path | str) -> list[Row]:
    """Read all rows of a file, or of a dataset by its id; a column `split` has its split's name.

    Raises UnusableTask if there are none, or one that is no object.
    """
    if isinstance(path, str) and isinstance(path := read_path(path), str):
        return _checked(list(hub_rows(path)), path)
    readers = {".jsonl": json_lines, ".json": _json, ".parquet": _parquet}
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
    return _checked(rows, path)


def _checked(rows: list[Any], path: Path | str) -> list[Row]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UnusableTask(f"{path}: row {number} is a {type(row).__name__}, not an object")
    if not rows:
        raise UnusableTask(f"{path} has no rows: give it some")
    return rows


def row_identity(row: Row) -> str:
    """Return the canonical JSON of a row, the same in every process.

    Dates, times, decimals and bytes count as texts. Raises UnusableTask that names the field of any
    other value that JSON cannot carry.
    """
    if not isinstance(row, Mapping):
        raise UnusableTask(f"a row is a {type(row).__name__}: make it a mapping")
    try:
        return _canonical(dict(row))
    except (TypeError, ValueError, RecursionError):
        for key, value in row.items():
            _refuse(key, value)
        raise


def _refuse(key: Any, value: Any) -> None:
    """Raise UnusableTask for a field that JSON cannot carry."""
    if not isinstance(key, str):
        raise UnusableTask(f"a row has the field {key!r}: name all fields by texts")
    try:
        _canonical(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableTask(
            f"JSON cannot carry the field {key!r} of a row ({error}): use texts, numbers, lists "
            "and mappings, or define identity(self, row)"
        ) from None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_text_of)


def _text_of(value: Any) -> str:
    if isinstance(value, date | time | Decimal | bytes):
        return repr(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def held_out(
    rows: Sequence[Row], every: int, identity: Callable[[Row], str], path: Path | str
) -> dict[Split, list[Row]]:
    """Split different rows by their column `split`; without it each `every`-th is held out.

    A row that is in both splits is held out. Raises UnusableTask for a label that is not in
    `LABELS`, and if a split has no row.
    """
    labels = _labels(rows, path)
    if labels is not None:  # a label is no part of what makes two rows the same problem
        keys = _identities([{**row, COLUMN: ""} for row in rows], identity, path)
        kept_out = {key for key, label in zip(keys, labels, strict=True) if label == "heldout"}
        how = f"its column {COLUMN!r}: label rows of both splits, or remove the column"
    else:
        keys = _identities(rows, identity, path)
        kept_out = set(list(dict.fromkeys(keys))[every - 1 :: every])
        how = f"data.heldout_every {every}: give more rows or lower data.heldout_every"
    found: dict[Split, list[Row]] = {"train": [], "heldout": []}
    different: dict[str, Row] = {}
    for key, row in zip(keys, rows, strict=True):
        if key not in different:
            different[key] = row
            found["heldout" if key in kept_out else "train"].append(row)
    for split, those in found.items():
        if not those:
            raise UnusableTask(
                f"{path} has {len(different)} different rows and none is for {split!r} with {how}"
            )
    return found


def _identities(rows: Sequence[Row], identity: Callable[[Row], str], path: Path | str) -> list[str]:
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(identity(row))
        except UnusableTask as error:
            raise UnusableTask(f"{path}, row {number}: {error}") from None
    return found


def label_of(value: Any) -> Split | None:
    """Return what a value of the column `split` means; None if that is unknown."""
    return LABELS.get(str(value).strip().lower().replace("-", "_"))


def _labels(rows: Sequence[Row], path: Path | str) -> list[Split] | None:
    """Return what the column `split` says of each row; None if there is no such column."""
    stated = [row.get(COLUMN) for row in rows]
    if all(one is None for one in stated):
        return None
    found = [label_of(one) for one in stated]
    unknown: dict[str, int] = {}
    for number, (one, label) in enumerate(zip(stated, found, strict=True), 1):
        if label is None:
            unknown.setdefault(str(one)[:40], number)
    if unknown:
        listed = [f"{one!r} (row {number})" for one, number in unknown.items()][:MOST_LISTED]
        raise UnusableTask(
            f"{path} has a column {COLUMN!r} with {', '.join(listed)}, and it decides what is held "
            f"out: write one of {', '.join(LABELS)} in each row, or rename the column"
        )
    return [label for label in found if label is not None]


def json_lines(path: Path) -> Iterable[Any]:
    """Yield the value of each line; raises UnusableTask that names the line that is none."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(line, f"{path}: line {number}")


def _json(path: Path) -> Iterable[Any]:
    found = _parsed(path.read_bytes(), str(path))
    if not isinstance(found, list):
        raise UnusableTask(f"{path} holds a {type(found).__name__}: write a list of objects")
    return found


def _parsed(content: bytes, where: str) -> Any:
    try:
        text = content.decode()
        found = json.loads(text)
        if "\\ud" in text.lower():  # half a character, which no id and no prompt can hold
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise UnusableTask(
            f"{where} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}: "
            "save it as UTF-8, such as by iconv -f LATIN1 -t UTF-8 (or -f UTF-16)"
        ) from None
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!a}"
        raise UnusableTask(f"{where} holds {half}, which is half a character: remove it") from None
    except (ValueError, RecursionError) as error:
        raise UnusableTask(f"{where} is not valid JSON: {error}") from error
    return found


def _parquet(path: Path) -> Iterable[Any]:
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise UnusableTask(f"{path} is not a Parquet file: {error}") from error


def _dataset(path: Path) -> Iterable[Any]:
    datasets = _datasets(f"{path} is a folder")
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise UnusableTask(f"{path} is not a folder of datasets.save_to_disk: {error}") from error
    return _labelled(found) if isinstance(found, datasets.DatasetDict) else list(found)


def _labelled(splits: Mapping[str, Any]) -> list[Any]:
    """Return all rows with their splits: `train_sft`, `test_sft` and the like by the first word."""
    labels = {split: split.partition("_")[0] for split in splits}
    labels = {split: one if one in LABELS else split for split, one in labels.items()}
    return [{**row, COLUMN: labels[split]} for split in splits for row in splits[split]]


@lru_cache(maxsize=2)
def hub_rows(named: str) -> Sequence[Any]:
    """Return the rows of a dataset of a hub; those of a single split are not labelled.

    Raises UnusableTask. Loaded once in a process.
    """
    datasets, found = _datasets(f"{named} is the id of a dataset"), HubId.parse(named)
    if found is None:
        raise UnusableTask(f"{named} is not an id of a dataset: write ORG/NAME or ORG/NAME:CONFIG")
    config, revision = found.part or None, found.revision or None
    try:
        splits = datasets.load_dataset(found.repo, config, revision=revision)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UnusableTask(f"{named} cannot be loaded ({why}): correct what it names") from None
    return list(*splits.values()) if len(splits) == 1 else _labelled(splits)


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UnusableTask(
            f"{what}, which needs the package datasets: pip install 'composer-mesh[datasets]'"
        ) from None
    return datasets
