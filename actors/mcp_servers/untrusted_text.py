"""What an MCP server says, made fit for a prompt: bounded, and without control characters."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

LONGEST_RESULT = 100_000
"""Characters of a tool's result that the agent reads."""
LONGEST_DESCRIPTION = 4_000
LONGEST_PARAMETERS = 10_000
"""Characters of a tool's schema as JSON; a tool with a larger one is refused."""
LONGEST_ERROR = 500

_KEPT = "\n\t"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")
"""Unicode categories without a glyph: control and format characters, surrogates, unassigned."""


def clean(text: str, longest: int) -> str:
    """Return a text without characters that are not shown, cut to `longest` with a note."""
    kept = text[: 2 * longest]
    shown = "".join(c for c in kept if c in _KEPT or unicodedata.category(c) not in _HIDDEN)
    if len(text) <= longest:
        return shown
    return f"{shown[:longest]}… ({len(text):,} characters, cut)"


def clean_json(value: Any) -> Any:
    """Return a JSON value with all its texts cleaned."""
    if isinstance(value, str):
        return clean(value, LONGEST_PARAMETERS)
    if isinstance(value, list):
        return [clean_json(one) for one in value]
    if isinstance(value, dict):
        return {clean(str(key), LONGEST_PARAMETERS): clean_json(one) for key, one in value.items()}
    return value


def result_text(blocks: Sequence[Any], structured: Any) -> str:
    """Return the content of a result: its texts, line by line, and the names of other kinds."""
    parts = [_block(one) for one in blocks]
    if not parts and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    return clean("\n".join(parts), LONGEST_RESULT)


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    resource = getattr(block, "resource", None)
    if resource is not None and isinstance(getattr(resource, "text", None), str):
        return str(resource.text)
    about = getattr(block, "uri", None) or getattr(resource, "uri", None)
    about = about or getattr(block, "mime_type", None)
    return f"[{block.type}: {about}]" if about else f"[{block.type}]"
