"""Runs the smallest form of every benchmark, or of some that a commit's hash chooses.

    python benchmarks/quick.py [--chosen N | NAME ...]

A benchmark fails by any exit status but 0 and 3; with 3 it has said which ratios are missing.
"""

import argparse
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report import MISSING_STATUS

FOLDER = Path(__file__).parent
LIMIT_S = 900.0
"""Of one benchmark, on a machine that is busy with other things."""
NEED_ARGUMENTS = {"serve_peer", "sdpo_topk", "trl_rare_rewards"}
"""Those that cannot start without a run or an environment of the user's."""


def benchmarks() -> list[str]:
    """Return the names of all benchmarks that have a smallest form."""
    takes = re.compile(r"^    (?:\w+ = )?(?:arguments|_arguments)\(", re.MULTILINE)
    found = [path for path in sorted(FOLDER.glob("*.py")) if takes.search(path.read_text())]
    mains = [path.stem for path in found if '__name__ == "__main__"' in path.read_text()]
    return [name for name in mains if name not in NEED_ARGUMENTS]


def chosen(commit: str, number: int) -> list[str]:
    """Return the benchmarks that a commit chooses."""
    return random.Random(commit).sample(benchmarks(), number)


def commit() -> str:
    """Return the hash of the commit that is checked out."""
    command = ["git", "-C", str(FOLDER), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(names: Sequence[str]) -> dict[str, int | str]:
    """Run benchmarks one after another; return the exit statuses of those that failed."""
    failed: dict[str, int | str] = {}
    for name in names:
        print(f"\n== {name} --quick", flush=True)
        began = time.monotonic()
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick"]
        try:
            status: int | str = subprocess.run(command, check=False, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = f"no end within {LIMIT_S:g} s"
        print(f"== {name}: {status} after {time.monotonic() - began:.0f} s", flush=True)
        if status not in (0, MISSING_STATUS):
            failed[name] = status
    return failed


def main() -> int:
    """Run what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--chosen", type=int, metavar="N", help="as many, by the commit's hash")
    given = parser.parse_args()
    names = given.names or benchmarks()
    failed = run(chosen(commit(), given.chosen) if given.chosen else names)
    for name, status in failed.items():
        print(f"{name} failed: {status}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
