"""Texts of tools as the agent reads them: cut by one rule, with numbered lines."""

from __future__ import annotations

import ast
import warnings

from composer_mesh.plugins.code_tasks.static_rules import LARGEST

LONGEST_LINE = 500


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters and a line that says what is missing.

    The first third and the last two thirds are kept: failures are reported at the end.
    """
    if len(text) <= most:
        return text
    head = most // 3
    missing = len(text) - most
    return f"{text[:head]}\n[{missing:,} characters are left out here]\n{text[-(most - head) :]}"


def numbered(text: str, first: int, count: int) -> str:
    """Return some lines of a text with their numbers, and how many there are in all."""
    lines = text.splitlines()
    shown = lines[first - 1 : first - 1 + count]
    body = "\n".join(
        f"{number:>5}  {line[:LONGEST_LINE]}" for number, line in enumerate(shown, first)
    )
    rest = len(lines) - (first - 1 + len(shown))
    return f"{body}\n[{rest} more lines]" if rest > 0 else body


def decoded(content: bytes) -> str:
    """Return a file as text; what is no UTF-8 is replaced."""
    return content.decode("utf-8", errors="replace")


def syntax_error(path: str, content: str) -> tuple[int, str] | None:
    """Return line and message of a module's first syntax error; None if it has none."""
    if not path.endswith(".py") or len(content) > LARGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(content)
    except SyntaxError as error:
        return error.lineno or 0, str(error.msg)[:200]
    except (ValueError, RecursionError, MemoryError) as error:
        return 0, f"{type(error).__name__}: the module cannot be parsed"
    return None
