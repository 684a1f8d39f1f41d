"""Writes the Parquet file of the task: python -m parquet_math.make_rows FILE"""

import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet


def write_rows(path: Path, count: int = 3000) -> int:
    """Write questions about three numbers; return how many."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        a, b, c = rng.sample(range(100), 3)
        rows.append({"question": f"Largest of {a}, {b}, {c}?", "answer": str(max(a, b, c))})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return len(rows)


if __name__ == "__main__":
    print(f"{write_rows(Path(sys.argv[1]))} rows")
