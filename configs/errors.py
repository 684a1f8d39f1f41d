"""The error of an invalid config, and how values and messages are written in one line."""

import json

LONGEST_LINE = 1000


class ConfigError(Exception):
    """The config is invalid; the message has one line for each problem."""


def shown(value: object) -> str:
    """Format a value as JSON, truncated to 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    """Return a message as one printable line of bounded length, with its beginning and its end."""
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE - 200]} ... {text[-195:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
