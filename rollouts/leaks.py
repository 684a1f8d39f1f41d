"""Detection of the verified answer in a text, however it is written.

Numbers are compared as values, in every view of the text that `disguises` gives and with number
words as digits; so are two numbers with an operator between them, percentages and dozens. Other
answers are searched as words. Other descriptions of an answer ("half of 84") are not found.
"""

import base64
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from composer_mesh.rollouts.number_words import (
    decoded,
    english_words,
    foreign_words,
    normalized,
    views,
    with_digits,
)
from composer_mesh.rollouts.tool_calls import normal_form

SMALLEST_WORD = 2
"""Smallest number searched as a word: "one" is too common, so smaller ones match only as digits."""
TOLERANCE = 1e-9
_GAP = r"[\W_]*"
_ALONE, _ENDS = r"(?<![^\W_])", r"(?![^\W_])"
"""No letter or digit before and after; an underscore parts words."""
LONGEST_SPACED = 40
_GROUPS = re.compile(r"(?<=\d)[,_' ](?=\d{3}(?!\d))|(?<=\d)[,_'](?=\d\d,\d{3}(?!\d))")
_POINTS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{3})+(?!\.?\d)")
_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.])(-?)(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d{1,3})(?!\w))?(?!\d)")
_POWER = re.compile(r"(\d)\s*[x*\u00d7]\s*10\s*(?:\^|\*\*)?\s*[{(]?([+-]?\d{1,3})[)}]?")
_NEGATIVE = re.compile(r"\b(?:minus|negative)[\s-]*(?=\d)")
_AFTER_WORD = re.compile(
    r"(?:(?<=[^\W\d_]{3})|(?<=(?<![^\W_])[^\W\d_])|(?<=(?<![^\W_])[^\W\d_]{2}))(?=\d\d)|"
    "(?<=[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff])(?=[0-9])"
)
"""Where letters end and a number of two digits begins, or of one behind Japanese letters."""
_PLAIN = r"\d+(?:\.\d+)?"
_OPERATOR = r" ?[-+*/x\u00d7\u00f7] ?"
_CALCULATION = re.compile(rf"(?<![\w.+*/-])({_PLAIN})((?:{_OPERATOR}{_PLAIN})+)(?!\w)")
_STEP = re.compile(rf" ?([-+*/x\u00d7\u00f7]) ?({_PLAIN})")
_PERCENT = re.compile(rf"(?<![\w.])({_PLAIN}) ?(?:%|per ?cent\b)")
_DOZENS = re.compile(
    rf"(?<![\w.])(?:({_PLAIN})( and a half)? |(half )?a )dozen\b(?: (?:and|plus) (\d+)(?!\w))?"
)
_BETWEEN = (
    r"(?:[\s,_;:|~'\"`\u2019\u2022\u2026()\[\]{}<>\\-]|"
    r"(?<!\.)(?:\.{2,}(?!\.)|\.(?=\s)|(?<=\s)\.(?![.\s]))|"
    r"\b(?:and|then|next|followed|by|point|dot|comma|dash|space|hyphen)\b)+"
)
_RUN = re.compile(rf"(?<![\w.])(?:\d+{_BETWEEN})+\d+(?!\w|\.\d)")
_ROMAN_DIGITS = tuple(
    zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"),
        strict=True,
    )
)
_WORD = re.compile(r"[^\W_]+")
ALSO_WORDS = ("mix",)
"""Small Roman numerals that are ordinary words."""
_BASES = re.compile(r"\b(?:hex\w*|binary|octal|base[\s-]*(?:2|8|16|two|eight|sixteen))\b")
_BACKWARDS = re.compile(r"revers|backward|mirror|right[\s-]to[\s-]left|back[\s-]to[\s-]front")


def holds_answer(text: str, answer: str) -> bool:
    """Whether a text contains the answer as a separate number or words; 12 is not in 120 or 1.12.

    A digit that ends a word (`q2`) does not count, nor does 3 where the answer is -3.
    """
    wanted = _wanted(answer)
    if not wanted.plain:
        return False
    return wanted.is_encoded_in(text) or any(wanted.is_in(view) for view in views(text))


@lru_cache(4096)
def _wanted(answer: str) -> "VerifiedAnswer":
    return VerifiedAnswer(answer)


@dataclass(frozen=True)
class VerifiedAnswer:
    """A verified answer, and how it may be written."""

    answer: str

    @cached_property
    def plain(self) -> str:
        return normalized(self.answer)

    @cached_property
    def value(self) -> float | None:
        """The answer as a finite number; None if it is none."""
        try:
            value = float(_GROUPS.sub("", self.plain))
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    @cached_property
    def whole(self) -> int | None:
        """The answer without its sign, if it is an integer that words are searched for."""
        value = self.value
        if value is None or not value.is_integer() or not SMALLEST_WORD <= abs(value) <= 1e15:
            return None
        return int(abs(value))

    def is_in(self, view: str) -> bool:
        """Whether a normalized text contains the answer."""
        if self._words.search(view):
            return True
        if self.value is None:
            return len(self.plain) >= 4 and self._spaced.search(view) is not None
        return self._is_number_in(view) or self._is_foreign_in(view)

    def is_encoded_in(self, text: str) -> bool:
        """Whether a text contains the answer in base64, in other numerals, or backwards."""
        if any(code in text for code in self._base64):
            return True
        plain = normalized(decoded(text))
        if any(pattern.search(plain) for pattern in self._backwards):
            return True
        if self.whole is None:
            return False
        named = _BASES.search(plain) is not None
        return (
            self._roman.search(normal_form("NFKC", text)) is not None
            or self._other_bases[named].search(plain) is not None
            or bool(_BACKWARDS.search(plain) and self._is_number_in(plain, backwards=True))
        )

    def _is_number_in(self, view: str, backwards: bool = False) -> bool:
        value = self.value
        if value is None:
            return False
        if backwards:
            value = float(str(self.whole)[::-1])
        sign = abs if value > 0 else float
        found = set(_values(view))
        if abs(value) >= SMALLEST_WORD:
            found |= set(_values(with_digits(view)))
        return any(
            abs(sign(one) - value) <= TOLERANCE * max(1.0, abs(value)) for one in found
        ) or any(
            len(digits) > 1 and digits == self._digits[1] and (value > 0 or negative)
            for negative, digits in _runs(view)
        )

    def _is_foreign_in(self, view: str) -> bool:
        parted = f" {' '.join(_WORD.findall(view))} "
        return any(word in parted for word in self._foreign)

    @cached_property
    def _words(self) -> re.Pattern[str]:
        before = _ALONE + r"(?<![.-])" if self.value is not None else _ALONE
        return re.compile(before + re.escape(self.plain) + r"(?![^\W_]|\.\d)")

    @cached_property
    def _spaced(self) -> re.Pattern[str]:
        letters = [re.escape(char) for char in self.plain[:LONGEST_SPACED] if char.isalnum()]
        return re.compile(_ALONE + _GAP.join(letters) + _ENDS)

    @cached_property
    def _digits(self) -> tuple[bool, str]:
        """The sign and the digits of the answer, without zeros that say nothing."""
        if self.value is None:
            return False, ""
        shown = str(int(self.value)) if self.value.is_integer() else repr(self.value)
        return self.value < 0, _digits_of(shown)

    @cached_property
    def _foreign(self) -> set[str]:
        """Other languages' words for the answer, between spaces where that language has them."""
        found: set[str] = set()
        for word in map(normalized, foreign_words(self.whole) if self.whole else ()):
            parts = _WORD.findall(word)
            alone = unicodedata.name(word[0], "").startswith(("LATIN", "CYRILLIC"))
            space = " " if alone else ""
            found |= {f"{space}{joint.join(parts)}{space}" for joint in (" ", "")}
        return found

    @cached_property
    def _base64(self) -> list[str]:
        code = base64.b64encode(self.answer.strip().encode(errors="replace")).decode()
        return [code] if len(code) >= 4 and self.plain.isalnum() else []

    @cached_property
    def _backwards(self) -> list[re.Pattern[str]]:
        """Patterns of the answer's words from right to left."""
        texts = [self.plain] if self.value is None else []
        if self.whole is not None:
            texts += [text for text in english_words(self.whole) if len(text) >= 5]
        letters = [re.sub(r"[\W_]", "", text)[::-1] for text in texts]
        return [
            re.compile(_ALONE + _GAP.join(map(re.escape, word)) + _ENDS)
            for word in letters
            if len(word) >= 4
        ]

    @cached_property
    def _roman(self) -> re.Pattern[str]:
        """The Roman numeral in capitals, or from three letters on in small ones."""
        roman = _roman_of(self.whole or 0)
        if len(roman) < 2:
            return re.compile(r"(?!)")
        small = roman.lower()
        either = f"{roman}|{small}" if len(roman) > 2 and small not in ALSO_WORDS else roman
        return re.compile(f"{_ALONE}(?:{either}){_ENDS}")

    @cached_property
    def _other_bases(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The answer in bases 2, 8 and 16: with a prefix or suffix, and as it stands."""
        value = self.whole or 0
        forms = [f"0x0*{value:x}", rf"\\?x0*{value:x}", f"0b0*{value:b}", f"0o0*{value:o}"]
        forms += [f"0*{value:x}h", f"0*{value:b}b"]
        if value >= 16 and value & (value - 1):
            forms.append(f"{value:b}")
        bare = [*forms, f"{value:x}", f"{value:b}", f"{value:o}"]
        return _one_of(forms), _one_of(bare)


def _values(text: str) -> Iterator[float]:
    """Yield the numbers of a normalized text, grouped by thousands or not."""
    grouped = _GROUPS.sub("", text)
    text = _NEGATIVE.sub("-", _AFTER_WORD.sub(" ", text)).replace("_", " ")
    whole = _POINTS.sub(lambda number: number.group().replace(".", ""), text)
    power = _POWER.sub(r"\1e\2", text)
    for reading in {text, grouped, _GROUPS.sub("", text), whole, _COMMA.sub(".", text), power}:
        yield from _numbers(reading)
    yield from _calculated(_GROUPS.sub("", text))


def _calculated(text: str) -> Iterator[float]:
    """Yield what calculations with two numbers, percentages and dozens come to."""
    for first, steps in _CALCULATION.findall(text):
        (sign, second), *others = _STEP.findall(steps)
        if not others and (sign not in "/\u00f7" or float(second)):
            yield _OPERATIONS[sign](float(first), float(second))
    for share in _PERCENT.findall(text):
        yield float(share) / 100
    for count, and_half, half, more in _DOZENS.findall(text):
        dozens = float(count or 1) + bool(and_half) / 2 - bool(half) / 2
        yield 12 * dozens + float(more or 0)


_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    **dict.fromkeys("*x\u00d7", operator.mul),
    **dict.fromkeys("/\u00f7", operator.truediv),
}


def _numbers(text: str) -> Iterator[float]:
    for match in _NUMBER.finditer(text):
        sign, digits, exponent = match.groups()
        before = text[match.start() - 1] if match.start() else " "
        # A hyphen after a word or a number joins or subtracts; it is not a sign.
        minus = sign if not (before.isalnum() or before == ")") else ""
        yield float(f"{minus}{digits}e{exponent or 0}")


def _runs(text: str) -> Iterator[tuple[bool, str]]:
    """Yield sign and digits of numbers that are written in pieces: "4 2", "four, two"."""
    for reading in {text, with_digits(text)}:
        for match in _RUN.finditer(reading):
            before = reading[max(0, match.start() - 16) : match.start()].rstrip()
            negative = before.endswith(("-", "minus", "negative"))
            yield negative, _digits_of(match.group())


def _digits_of(text: str) -> str:
    return "".join(filter(str.isdecimal, text)).lstrip("0")


def _one_of(forms: list[str]) -> re.Pattern[str]:
    return re.compile(f"{_ALONE}(?:{'|'.join(forms)}){_ENDS}")


def _roman_of(value: int) -> str:
    """Return a Roman numeral; "" for what has none."""
    if not 0 < value < 4000:
        return ""
    found = ""
    for worth, letters in _ROMAN_DIGITS:
        count, value = divmod(value, worth)
        found += letters * count
    return found
