"""Detection of the verified answer in a text.

Numbers are compared as values, so `12.0`, `1.2e1`, `twelve` and full-width digits all match 12; a
non-numeric answer is searched as words.
"""

import re
import unicodedata
from collections.abc import Iterator

_MINUS = str.maketrans("\u2212\u2010\u2011\u2012\u2013", "-----")
_GROUPS = re.compile(r"(?<=\d)[,_' ](?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.])(-?)(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d{1,3})(?!\w))?(?!\d)")
_WORD = re.compile(r"[a-z]+|[^\sa-z]")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_DECADES = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {word: value for value, word in enumerate(_ONES.split())}
_TENS = {word: 10 * value for value, word in enumerate(_DECADES.split(), start=2)}
SMALLEST_WORD = 2
"""Smallest number searched as a word: "one" is too common, so smaller ones match only as digits."""
TOLERANCE = 1e-9


def holds_answer(text: str, answer: str) -> bool:
    """Whether a text contains the answer as a separate number or words; 12 is not in 120 or 1.12.

    A number that ends a word (`x12`) or has the other sign does not count.
    """
    plain, wanted = _plain(text), _plain(answer)
    if wanted and re.search(rf"(?<![\w.-]){re.escape(wanted)}(?!\w|\.\d)", plain):
        return True
    try:
        value = float(_GROUPS.sub("", wanted))
    except ValueError:
        return False
    found = [*_numbers(plain), *_numbers(_GROUPS.sub("", plain)), *_spelled(plain)]
    return any(abs(one - value) <= TOLERANCE * max(1.0, abs(value)) for one in found)


def _plain(text: str) -> str:
    """Normalize a text: NFKC, casefold, one minus sign, single spaces, no format characters."""
    text = unicodedata.normalize("NFKC", text).translate(_MINUS).casefold()
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    return " ".join(text.split())


def _numbers(text: str) -> list[float]:
    found = []
    for match in _NUMBER.finditer(text):
        sign, digits, exponent = match.groups()
        before = text[match.start() - 1] if match.start() else " "
        # A hyphen after a word or a number joins or subtracts; it is not a sign.
        minus = sign if not (before.isalnum() or before == ")") else ""
        found.append(float(f"{minus}{digits}e{exponent or 0}"))
    return found


def _spelled(text: str) -> Iterator[int]:
    """Yield the integers from 2 to 999 that a text spells as English words."""
    total: int | None = None
    for word in [*_WORD.findall(text), "."]:
        value = _SMALL.get(word, _TENS.get(word))
        if total is not None and value is not None and _continues(total, value):
            total += value
        elif value is None and total is not None and word == "hundred" and 0 < total < 10:
            total *= 100
        elif value is None and total is not None and word in ("-", "and"):
            continue
        else:
            if total is not None and total >= SMALLEST_WORD and word not in ("thousand", "million"):
                yield total
            total = value


def _continues(total: int, value: int) -> bool:
    """Return whether `value` may follow as the smaller part: twenty five, two hundred five."""
    if total and total % 100 == 0:
        return 0 < value < 100
    return total % 100 >= 20 and total % 10 == 0 and 0 < value < 10
