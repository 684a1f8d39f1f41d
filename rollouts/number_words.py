"""Numbers as words: English ones become digits, and other languages' words for a number.

The words of other languages come from Unicode's own rules (CLDR, by `unicode-rbnf`).

Undoes what hides a number or a word in a text: look-alikes, invisible signs, markup, escapes.

Each view is the whole text, normalized in one way. `leaks` searches the views for the answer.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from composer_mesh.rollouts.tool_calls import normal_form, unescaped

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"))
_MARKS = str.maketrans({"\u066b": ".", "\u066c": ",", "\u00b7": ".", "\u2027": ".", "\u2219": "."})
_FILLERS = set("\u115f\u1160\u2800\u3164\uffa0")
_INVISIBLE = ("Cf", "Cc", "Mn", "Me", "Co", "Cn")
_CYRILLIC = dict(zip("авеѕіјкӏмнорстухԁԛԝһгь", "abesijklmhopctyxdqwhrb", strict=True))
_GREEK = dict(zip("αβγεηικμνορτυχω", "abyenikuvoptuxw", strict=True))
_LATIN = {"ı": "i", "ɑ": "a", "ɡ": "g", "ø": "o", "ł": "l"}
_LETTERS = str.maketrans(_CYRILLIC | _GREEK | _LATIN)
_DIGITS = dict(zip("oοо|lıiӏƨzзɜɛʒчsƽбbȣ8g", "00011111223333455688" + "89", strict=True))
_LEET = str.maketrans("01345789@$!", "oleastbgasi")
_DIGIT_LIKE = re.compile(rf"[0-9{''.join(_DIGITS)}]{{2,}}")
_SPACED = re.compile(r"\S+")
_LEET_LIKE = re.compile(r"[a-z0134578@$!]+")
_LETTERS_OF_WORDS = "abcdefghijklmnopqrstuvwxyz"
_COMMANDS = re.compile(r"\\[a-zA-Z]+\*?|\\[^\w\s]|</?[a-zA-Z][^<>]*>|[{}$*_~`^]")
_TIMES = re.compile(r"\\(?:times|cdot)\b")
_ESCAPES = re.compile(r"\\u\{?([0-9a-fA-F]{2,6})\}?|\\x([0-9a-fA-F]{2})|%([0-9a-fA-F]{2})")
_SUPERSCRIPT = re.compile("(?<=10)\u207b?[\u00b9\u00b2\u00b3\u2070\u2074-\u2079]+")


def views(text: str) -> Iterator[str]:
    """Yield the casefolded readings of a text, without repetitions."""
    seen: set[str] = set()
    for source in dict.fromkeys((text, decoded(text))):
        plain = normalized(source)
        unmarked = normalized(_COMMANDS.sub("", _TIMES.sub("\u00d7", source)))
        for view in (plain, unmarked, _with_letters(plain), _with_digits(plain), _leet(plain)):
            if view not in seen:
                seen.add(view)
                yield view


def normalized(text: str) -> str:
    """Return a text casefolded, with plain digits and signs, without accents or invisible signs."""
    if text.isascii() and text.isprintable():
        return " ".join(text.lower().split())
    text = _SUPERSCRIPT.sub(lambda power: "^" + power.group(), text)
    text = "".join(map(_digit, text))
    text = unicodedata.normalize("NFKD", normal_form("NFKC", text).casefold())
    text = text.translate(_MINUS).translate(_MARKS)
    return " ".join("".join(filter(_is_visible, text)).split())


def decoded(text: str) -> str:
    """Return a text with the escapes of HTML, JSON and URLs undone."""
    return _ESCAPES.sub(_character, unescaped(text))


def _digit(char: str) -> str:
    """Return the plain digits of any numeral sign of its own; ½ is .5, as part of 57½."""
    if char.isascii() or unicodedata.category(char) not in ("Nd", "No"):
        return char
    value = unicodedata.numeric(char, -1.0)
    if value.is_integer():
        return f"{int(value)}"
    return f"{value:.9g}".removeprefix("0")


def _is_visible(char: str) -> bool:
    if char in _FILLERS:
        return False
    return char in "\t\n\r" or unicodedata.category(char) not in _INVISIBLE


def _with_letters(text: str) -> str:
    """Replace letters that look like Latin ones."""
    return text.translate(_LETTERS)


def _with_digits(text: str) -> str:
    """Replace look-alikes of digits, in words that hold nothing but them and a digit."""

    def digits(run: re.Match[str]) -> str:
        letters, before, after = (
            run[0],
            text[max(0, run.start() - 1) : run.start()],
            text[run.end() : run.end() + 1],
        )
        # Next to a letter or digit, a word begins and ends at a vertical bar.
        start = (letters.find("|") + 1 or len(letters)) if before.isalnum() else 0
        end = max(letters.rfind("|"), 0) if after.isalnum() else len(letters)
        word = letters[start:end]
        if len(word) < 2 or (word.isascii() and not any(map(str.isdecimal, word))):
            return letters
        read = "".join(_DIGITS.get(char, char) for char in word)
        return f"{letters[:start]}{read}{letters[end:]}"

    return _DIGIT_LIKE.sub(digits, text)


def _leet(text: str) -> str:
    """Read digits within words as the letters that they stand for."""
    return _SPACED.sub(_leet_word, text)


def _leet_word(word: re.Match[str]) -> str:
    """Read the digits before the last letter of a word, and those joined to it."""
    last = max(map(word[0].rfind, _LETTERS_OF_WORDS))

    def letters(run: re.Match[str]) -> str:
        return run[0].translate(_LEET) if run.start() <= last else run[0]

    return _LEET_LIKE.sub(letters, word[0])


def _character(escape: re.Match[str]) -> str:
    code = int(next(filter(None, escape.groups())), 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape.group()


if TYPE_CHECKING:
    from unicode_rbnf import RbnfEngine

LANGUAGES = ("es", "fr", "de", "it", "pt", "nl", "pl", "ru", "tr", "id", "vi", "ko", "hi", "ar")
"""Those whose number words are searched, in addition to English, Chinese and Japanese."""
CARDINALS = ("spellout-numbering", "spellout-cardinal")
LARGEST_SPELLED = 999_999
SHORTEST_FOREIGN = 4
"""Letters of a foreign word in Latin script: shorter ones (dix, due, on) are too often others."""
ALSO_ENGLISH = {"once", "seize", "cent", "mille", "lima", "sept"}

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_DECADES = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = (
    "tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth "
    "nineteenth"
)
_UNITS_OF_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth"
_SMALL = {word: value for value, word in enumerate(_ONES.split())}
_SMALL |= {word: value for value, word in enumerate(_ORDINALS.split(), start=10)}
_TENS = {word: 10 * value for value, word in enumerate(_DECADES.split(), start=2)}
_TENS |= {word[:-1] + "ieth": value for word, value in list(_TENS.items())} | {"fourty": 40}
_UNITS = {word: value for value, word in enumerate(_UNITS_OF_ORDINALS.split(), start=1)}
_UNITS |= {word: value for word, value in _SMALL.items() if 0 < value < 10}
_SCALES = {"thousand": 1000, "million": 10**6}
_JOINED = re.compile(rf"({'|'.join(_TENS)})(?=(?:{'|'.join(_UNITS)})\b)")
_TOKEN = re.compile(r"[a-z]+|[^a-z]+")
_HAN = {"十": 10, "拾": 10, "百": 100, "佰": 100, "千": 1000, "仟": 1000, "万": 10**4, "萬": 10**4}
_HAN |= {"廿": 20, "卅": 30, "卌": 40}
_HAN_RUN = re.compile(
    "[零〇一二三四五六七八九十百千万萬两兩壹贰貳叁參肆伍陆陸柒捌玖拾佰仟廿卅卌弐]+"
)


@lru_cache(64)
def with_digits(text: str) -> str:
    """Return a casefolded text with English and Chinese number words written as digits."""
    text = _HAN_RUN.sub(lambda run: _han_digits(run.group()), text)
    return "".join(_english(_JOINED.sub(r"\1 ", text)))


def _english(text: str) -> Iterator[str]:
    """Yield the pieces of a text; a number of several words is one piece."""
    number: _Number | None = None
    gap = ""
    for token in _TOKEN.findall(text):
        if number is not None and number.take(token):
            gap = ""
        elif number is not None and not gap and _may_join(token):
            gap = token
        elif number is not None and gap and _may_continue(number, gap, token):
            gap += token
        else:
            if number is not None:
                yield f"{number.value}{gap}"
            number, gap = _Number.starting(token), ""
            if number is None:
                yield token
    if number is not None:
        yield f"{number.value}{gap}"


def _may_join(token: str) -> bool:
    return len(token) <= 2 and not token.strip(" -\u00ad")


def _may_continue(number: "_Number", gap: str, token: str) -> bool:
    """Whether a token may be between the words of a number after `gap`: two hundred and five."""
    return number.may_grow if token == "and" else gap.endswith("and") and not token.strip()


class _Number:
    """A number that is read word by word."""

    def __init__(self, value: int) -> None:
        self._thousands, self._rest = 0, value

    @classmethod
    def starting(cls, word: str) -> "_Number | None":
        value = _SMALL.get(word, _TENS.get(word))
        return None if value is None else cls(value)

    @property
    def value(self) -> int:
        return self._thousands + self._rest

    @property
    def may_grow(self) -> bool:
        return self.value >= 100 and self._rest % 100 == 0

    def take(self, word: str) -> bool:
        """Add the next word and return True, or return False if it starts something else."""
        rest = self._rest
        value = _SMALL.get(word, _TENS.get(word))
        if word == "hundred" and 0 < rest < 100 and rest % 10:
            self._rest *= 100
        elif word in _SCALES and 0 < rest < 1000 and not self._thousands % _SCALES[word]:
            self._thousands, self._rest = self._thousands + rest * _SCALES[word], 0
        elif rest % 100 >= 20 and rest % 10 == 0 and word in _UNITS:
            self._rest += _UNITS[word]
        elif value and value < 100 and rest % 100 == 0 and self.value:
            self._rest += value
        else:
            return False
        return True


def _han_digits(run: str) -> str:
    """Return the digits of Chinese numerals, with multipliers (四十二) or digit by digit (四二)."""
    digits = [unicodedata.numeric(char) for char in run]
    if not any(char in _HAN for char in run):
        return "".join(str(int(digit)) for digit in digits)
    total, section, current = 0, 0, 0
    for char, digit in zip(run, digits, strict=True):
        scale = _HAN.get(char)
        if scale is None:
            current = int(digit)
        elif scale == 10**4:
            total, section, current = total + (section + current or 1) * scale, 0, 0
        elif scale in (20, 30, 40):
            section += scale
        else:
            section, current = section + (current or 1) * scale, 0
    return str(total + section + current)


def english_words(value: int) -> set[str]:
    """Return how English writes a number; empty for large ones."""
    return _written("en", value) if 0 <= value <= LARGEST_SPELLED else set()


@cache
def foreign_words(value: int) -> frozenset[str]:
    """Return how other languages write a number, also digit by digit; empty for large ones."""
    if not 0 <= value <= LARGEST_SPELLED:
        return frozenset()
    found: set[str] = set()
    for language in LANGUAGES:
        found |= _written(language, value)
        if value >= 10:
            found.add(" ".join(min(_written(language, int(digit))) for digit in str(value)))
    return frozenset(word for word in found if _is_distinct(word))


@cache
def _written(language: str, value: int) -> set[str]:
    engine = _engine(language)
    written = engine.format_number(value, ruleset_names=_rules(language))
    return set(written.text_by_ruleset.values())


@cache
def _rules(language: str) -> list[str]:
    """Return the names of a language's cardinal numbers, in the nominative only."""
    names = _engine(language).format_number(0).text_by_ruleset
    cases = [name for name in names if name.startswith(CARDINALS) and name.count("-") <= 2]
    return cases or list(names)


def load_rules() -> None:
    """Read the rules of all languages, which takes half a second on a busy machine."""
    for language in ("en", *LANGUAGES):
        _rules(language)


@cache
def _engine(language: str) -> "RbnfEngine":
    from unicode_rbnf import RbnfEngine  # only where a hint is checked: most processes check none

    return RbnfEngine.for_language(language)


def _is_distinct(word: str) -> bool:
    latin = "".join(c for c in unicodedata.normalize("NFKD", word.casefold()) if c.isalpha())
    return not latin.isascii() or (len(latin) >= SHORTEST_FOREIGN and latin not in ALSO_ENGLISH)
