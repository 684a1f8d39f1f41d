"""Looks through the weights of a model folder for values that are not finite, without torch.

A folder of at most `WHOLE_BYTES` is read completely, in pieces: about 1 s a gigabyte, if the
disk is as fast. Of a larger one the first `SAMPLE_BYTES` of each tensor are read: the weights of a
training that has diverged are not finite from the first value on.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from composer_mesh.configs.regular_files import open_regular
from composer_mesh.planning.safetensors_header import read_places

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
