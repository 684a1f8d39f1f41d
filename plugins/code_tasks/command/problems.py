"""Files of problems in the format of HumanEval, as a package with a module and a test for each.

Each line is a JSON object: `prompt` (a module up to the docstring of its last function),
`canonical_solution` (the body), `entry_point` (the function) and `test`, which defines
`check(candidate)`. Nothing of it is run here.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
from typing import Any

PROBLEM_FILES = (".jsonl", ".jsonl.gz")
LARGEST = 64_000_000
TEXTS = ("prompt", "canonical_solution", "entry_point", "test")


def package_of_problems(name: str, content: bytes) -> dict[str, bytes]:
    """Return the files of a package; raises ValueError where a line is no problem."""
    module = re.sub(r"\W", "_", name).lower()
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nLicense: that of the file\n"
    files = {"PKG-INFO": about.encode(), f"{module}/__init__.py": b""}
    for place, row in enumerate(_rows(content)):
        problem = f"problem_{place:03d}"
        source = f"{row['prompt'].rstrip()}\n{row['canonical_solution'].rstrip()}\n"
        _parsed(source, place)
        test = (
            f"from {module}.{problem} import *\n\n{row['test'].strip()}\n\n\n"
            f"def test_{problem}():\n    check({row['entry_point']})\n"
        )
        _parsed(test, place)
        files[f"{module}/{problem}.py"] = source.encode()
        files[f"tests/test_{problem}.py"] = test.encode()
    return files


def _rows(content: bytes) -> list[dict[str, Any]]:
    if content[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(content)) as packed:
            content = packed.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes: split it")
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON in UTF-8 ({error}): correct it") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(one), str) for one in TEXTS):
            raise ValueError(f"line {number} is no problem: it needs the texts {', '.join(TEXTS)}")
        if not row["entry_point"].isidentifier():
            raise ValueError(f"line {number} has an entry_point that is no name of a function")
        rows.append(row)
    if not rows:
        raise ValueError("it has no problem")
    return rows


def _parsed(text: str, place: int) -> None:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"problem {place} is no Python ({error})") from None
