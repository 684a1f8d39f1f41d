"""Reads the header of a safetensors file without its tensors, and checks it against the file.

8 bytes, little endian: length n   n bytes of JSON   the tensors, one after the other

Looks through the weights of a model folder for values that are not finite, without torch.

A folder of at most `WHOLE_BYTES` is read completely, in pieces: about 1 s a gigabyte, if the
disk is as fast. Of a larger one the first `SAMPLE_BYTES` of each tensor are read: the weights of a
training that has diverged are not finite from the first value on.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from composer_mesh.configs.regular_files import open_regular

Shapes = dict[str, tuple[int, ...]]

MOST_HEADER_BYTES = 1 << 24
"""Longest header that is read: some 100,000 tensors in one file."""

_MOST_DIMENSIONS = 16

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class UnfitHeader(ValueError):
    """A header that does not describe its file."""


def read_shapes(path: Path) -> Shapes:
    """Return the shape of each tensor in a file; raises `UnfitHeader` and OSError."""
    with open_regular(path) as file:
        header, rest = _read(file)
    found: Shapes = {}
    places: list[tuple[int, int]] = []
    for name, about in header.items():
        if name != "__metadata__":
            found[name], place = _checked(name, about)
            places.append(place)
    end = 0
    for begin, stop in sorted(places):
        if begin != end:
            raise UnfitHeader("has tensors that overlap or leave gaps")
        end = stop
    if end != rest:
        raise UnfitHeader(f"has {rest} bytes of tensors but its header describes {end}")
    return found


def read_places(path: Path) -> dict[str, tuple[str, int, int]]:
    """Return type, begin and end in bytes of each tensor in a file that `read_shapes` accepts."""
    with open_regular(path) as file:
        header, _ = _read(file)
        start = file.tell()
    places = {name: one["data_offsets"] for name, one in header.items() if name != "__metadata__"}
    return {
        name: (header[name]["dtype"], start + begin, start + end)
        for name, (begin, end) in places.items()
    }


def _read(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header, and how many bytes come after it."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
        most = min(max(size - 8, 0), MOST_HEADER_BYTES)
        raise UnfitHeader(f"says that its header has {length} bytes, but {most} are possible")
    try:
        found = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise UnfitHeader(f"has a header that is not JSON ({str(error)[:200]})") from None
    if not isinstance(found, dict):
        raise UnfitHeader("has a header that is no JSON object")
    return found, size - 8 - length


def _checked(name: str, about: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return a tensor's shape, and where its bytes begin and end."""
    told: dict[str, Any] = about if isinstance(about, dict) else {}
    kind: Any = told.get("dtype")
    shape, place = _counts(told.get("shape")), _counts(told.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or place is None or len(place) != 2:
        raise UnfitHeader(f"does not say dtype, shape and data_offsets of {name[:80]!r}")
    if kind not in _BITS:
        raise UnfitHeader(f"has {name[:80]!r} in {kind[:20]!r}, which is no type of a weight")
    if (place[1] - place[0]) * 8 != math.prod(shape) * _BITS[kind]:
        raise UnfitHeader(f"has {place[1] - place[0]} bytes for {name[:80]!r} of shape {[*shape]}")
    return shape, (place[0], place[1])


def _counts(values: Any) -> tuple[int, ...] | None:
    """Return a short list of numbers from 0 to 2^63, None for everything else."""
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        return None
    return tuple(values) if all(type(n) is int and 0 <= n < 1 << 63 for n in values) else None


WHOLE_BYTES = 16 << 30
SAMPLE_BYTES = 1 << 20
PIECE_BYTES = 1 << 24
_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("u1", 0x7C),
}
"""The bits of an exponent, all of which are set in what is not finite."""


def not_finite(files: Iterable[Path], whole_bytes: int = WHOLE_BYTES) -> Iterator[tuple[Path, str]]:
    """Yield the file and the name of each tensor with NaN or infinity; raises OSError."""
    paths = list(files)
    sample = sum(path.stat().st_size for path in paths) > whole_bytes
    for path in paths:
        places = read_places(path)
        with open_regular(path) as file:
            for name, (kind, begin, end) in places.items():
                stop = min(end, begin + SAMPLE_BYTES) if sample else end
                if kind in _EXPONENTS and _has_some(file, begin, stop, *_EXPONENTS[kind]):
                    yield path, name


def _has_some(file: BinaryIO, begin: int, end: int, words: str, exponent: int) -> bool:
    """Whether some word between two places of a file has an exponent of ones."""
    import numpy as np  # late: other readers of a folder's facts do without it

    file.seek(begin)
    while begin < end:
        piece = file.read(min(PIECE_BYTES, end - begin))
        if not piece:
            raise OSError("it ended while it was read")
        begin += len(piece)
        found = np.frombuffer(piece, words)
        if ((found & found.dtype.type(exponent)) == exponent).any():
            return True
    return False
