"""Deletions: lines of a file that others replace. Standard library only: boxes run it."""

from collections.abc import Iterable
from typing import NamedTuple


class Deletion(NamedTuple):
    """Lines `first` to `last` of a file, counted from 1, and what stands there instead."""

    path: str
    first: int
    last: int
    text: str


def with_deletions(content: str, deletions: Iterable[Deletion]) -> str:
    r"""Return the text of a file after deletions of it, which do not overlap.

    >>> with_deletions("a\nb\nc\n", [Deletion("x", 2, 2, "B\n")])
    'a\nB\nc\n'
    """
    lines = lines_of(content)
    for one in sorted(deletions, key=lambda one: one.first, reverse=True):
        lines[one.first - 1 : one.last] = [one.text]
    return "".join(lines)


def lines_of(content: str) -> list[str]:
    r"""Return the lines as Python's parser counts them: a form feed ends none.

    >>> lines_of("a\x0cb\r\nc")
    ['a\x0cb\r\n', 'c']
    """
    lines = content.split("\n")
    ended = [f"{line}\n" for line in lines[:-1]]
    return [*ended, lines[-1]] if lines[-1] else ended
