"""Unicode and HTML of texts that somebody else wrote, in time that grows with their length."""

import html
import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

MOST_MARKS = 30
"""Combining marks in a row that are put in order, as in Unicode's stream-safe format."""
_JOINER = "\u034f"
_LONG_REFERENCE = re.compile(r"(?<=&#)[0-9]{8,}")


def normal_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return a text in a normal form of Unicode.

    Longer runs of combining marks are parted: to put n of them in order takes n * n steps.
    """
    if text.isascii():
        return text
    return unicodedata.normalize(form, "".join(_parted(text)))


def unescaped(text: str) -> str:
    """Return a text with the references of HTML resolved; those of no character become U+FFFD.

    Unlike `html.unescape` it takes references of any length, which have too many digits for `int`.
    """
    return html.unescape(_LONG_REFERENCE.sub(lambda digits: digits[0].lstrip("0")[:8] or "0", text))


def _parted(text: str) -> Iterator[str]:
    marks = 0
    for char in text:
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks > MOST_MARKS:
            yield _JOINER
            marks = 1
        yield char
