"""Writes the Parquet file of the task: python -m parquet_math.make_rows FILE"""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

WORDS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b}


def write_rows(path: Path, largest: int = 12) -> int:
    """Write every question with numbers up to `largest`; return how many there are."""
    rows = [
        {"question": f"{a} {word} {b}?", "answer": str(result(a, b))}
        for a in range(largest + 1)
        for b in range(largest + 1)
        for word, result in WORDS.items()
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return len(rows)


if __name__ == "__main__":
    print(f"{write_rows(Path(sys.argv[1]))} rows")
