"""The error of an invalid config, and how values and messages are written in one line."""

import difflib
import json
from collections.abc import Iterable, Sequence

LONGEST_LINE = 1000
MOST_SUGGESTED = 3
ALIKE = 0.6
LESS_ALIKE = 0.1


class ConfigError(Exception):
    """The config is invalid; the message has one line for each problem."""


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are spelled like a word, the most similar one first."""
    known = list(dict.fromkeys(names))
    found = difflib.get_close_matches(word, known, MOST_SUGGESTED, ALIKE)
    ratios = [difflib.SequenceMatcher(None, one, word).ratio() for one in found]
    return [one for one, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - LESS_ALIKE]


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question for one to three names."""
    *others, last = names
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def shown(value: object) -> str:
    """Format a value as JSON, truncated to 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    """Return a message as one printable line of bounded length, with its beginning and its end."""
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE - 200]} ... {text[-195:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
