"""File of a step's divergences: what the SDPO channel saw at each token of each hinted turn.

    divergences/000/checksums.jsonl       size and CRC-32 of each file, a line for each write
    divergences/000/000012.safetensors    values: all turns' numbers in nats, in order
                                          turns, lengths: each turn's number and its tokens
                                          body: JSON; the trace id of each turn

Only for people to look at: no part of a run reads it, and a resume that trains a step again
replaces its file. Steps count from 0.
"""

import json
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.rollouts.traces import TurnDivergences
from composer_mesh.services.directory.file_checksums import FileSum, difference
from composer_mesh.services.store.rows import DamagedRecord

FOLDER = "divergences"
STEPS_IN_A_FOLDER = 1000
FORMAT = "composer-mesh divergences 1"
SUMS_FILE, MOST_SUMS = "checksums.jsonl", 1 << 24
"""Size and CRC-32 of each file of a folder; the last line about a step is the one that holds."""
REPAIR = "remove it: nothing but the colours of tokens is lost"
MOST = 1 << 30
"""Size in bytes of the largest file that is read."""
KINDS = {"values": "float16", "turns": "int32", "lengths": "int32", "body": "uint8"}
LARGEST = float(np.finfo(np.float16).max)

_IDS = fail_fast(list[str])


def divergences_path(root: Path, step: int) -> Path:
    """Return the path of a step's file."""
    folder = f"{step // STEPS_IN_A_FOLDER:03}"
    return root / FOLDER / folder / f"{step:06}.safetensors"


def write_divergences(root: Path, step: int, found: Sequence[TurnDivergences]) -> None:
    """Write a step's file to disk, in 16 bits a token; raises OSError without leaving a file."""
    values = [np.asarray(one.values, np.float32) for one in found]
    joined = np.concatenate(values) if values else np.empty(0, np.float32)
    tensors: dict[str, NDArray[np.generic]] = {
        "values": np.nan_to_num(joined, nan=np.nan, posinf=LARGEST, neginf=-LARGEST)
        .clip(-LARGEST, LARGEST)
        .astype(np.float16),
        "turns": np.array([one.turn for one in found], np.int32),
        "lengths": np.array([len(one.values) for one in found], np.int32),
        "body": np.frombuffer(_IDS.dump_json([one.trace_id for one in found]), np.uint8),
    }
    path, content = divergences_path(root, step), save(tensors, {"format": FORMAT})
    noted = {"step": step, "bytes": len(content), "crc32": zlib.crc32(content)}
    with OpenFolder(root) as folder:
        sums = str((path.parent / SUMS_FILE).relative_to(root))
        with folder.append(sums) as lines:
            lines.write(json.dumps(noted).encode() + b"\n")
        folder.write_whole(str(path.relative_to(root)), content)


def damaged_divergences(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each step's file that is missing or not as it was written, and what is wrong."""
    for sums in sorted((root / FOLDER).glob(f"*/{SUMS_FILE}")):
        try:
            noted = [parsed_json(line) for line in read_regular(sums, MOST_SUMS).splitlines()]
            latest = {int(one["step"]): FileSum(one["bytes"], one["crc32"]) for one in noted}
        except (OSError, ValueError, LookupError, TypeError) as error:
            yield sums, f"it cannot be read: {short_reason(error)}"
            continue
        for step, one in latest.items():
            path = divergences_path(root, step)
            try:
                if why := difference(path, one, grows=False):
                    yield path, why
            except OSError as error:
                yield path, f"it cannot be read: {error.strerror}"


def read_divergences(root: Path, step: int) -> list[TurnDivergences]:
    """Read a step's divergences; empty without a file. Raises DamagedRecord for another content."""
    path = divergences_path(root, step)
    try:
        return _divergences(load(read_regular(path, MOST)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedRecord(str(path), f"cannot be read: {error.strerror}", REPAIR) from None
    except (SafetensorError, ValueError, TypeError) as error:
        raise DamagedRecord(str(path), short_reason(error), REPAIR) from None


def _divergences(tensors: Mapping[str, NDArray[np.generic]]) -> list[TurnDivergences]:
    kinds = {name: array.dtype.name for name, array in tensors.items() if array.ndim == 1}
    if kinds != KINDS:
        raise ValueError(f"its arrays are {sorted(kinds)}, not {sorted(KINDS)}")
    ids, lengths = _IDS.validate_json(tensors["body"].tobytes()), tensors["lengths"].tolist()
    values = tensors["values"].tolist()
    if not len(ids) == len(lengths) == len(tensors["turns"]):
        raise ValueError(f"it has {len(ids)} ids of rollouts for {len(lengths)} turns")
    if any(length < 0 for length in lengths) or sum(lengths) != len(values):
        raise ValueError(f"it has {len(values)} values, and {sum(lengths)} are stated")
    ends = np.cumsum([0, *lengths]).tolist()
    return [
        TurnDivergences(trace_id, turn, array("f", values[first:last]))
        for trace_id, turn, (first, last) in zip(
            ids, tensors["turns"].tolist(), pairwise(ends), strict=True
        )
    ]
