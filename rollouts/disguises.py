"""Undoes what hides a number or a word in a text: look-alikes, invisible signs, markup, escapes.

Each view is the whole text, normalized in one way. `leaks` searches the views for the answer.
"""

import re
import unicodedata
from collections.abc import Iterator

from composer_mesh.rollouts.foreign_text import normal_form, unescaped

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
