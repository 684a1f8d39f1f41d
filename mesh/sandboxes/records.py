"""The stream between a sandbox and the runner in its box: records of a kind, a name and bytes.

Both ends use this file, so it imports nothing. What comes out of a box is data of a stranger:
`tasks.sandbox` checks names, and each reader bounds lengths before it reads.
"""

from __future__ import annotations

JOB, FILE = b"j", b"f"
STARTED, EXITED, SIGNALLED, LATE, SPENT = b"s", b"x", b"g", b"w", b"c"
STDOUT, STDERR, CUT, REMOVED, REFUSED, SECONDS = b"o", b"e", b"k", b"r", b"n", b"t"
END = b"z"
HEAD_BYTES = 11
LONGEST_NAME = 4096


def record(kind: bytes, name: bytes = b"", data: bytes = b"") -> bytes:
    """Return a record: one byte of kind, two and eight of lengths, the name, the data."""
    lengths = len(name).to_bytes(2, "little") + len(data).to_bytes(8, "little")
    return kind + lengths + name + data


def lengths_of(head: bytes) -> tuple[bytes, int, int]:
    """Return the kind, the length of the name and that of the data."""
    return head[:1], int.from_bytes(head[1:3], "little"), int.from_bytes(head[3:11], "little")
