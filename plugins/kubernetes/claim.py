"""Init step of a controller's pod: claims the run's directory for one launch, or refuses.

Only the pods can access the volume, so the launcher cannot check it. A replacement pod of the same
launch finds the directory claimed for it. Workers may have announced themselves there before;
records of workers that are gone are removed.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from composer_mesh.mesh.hosts import address
from composer_mesh.mesh.hosts.roster import ROSTER, Record, read_roster, withdraw
from composer_mesh.mesh.open_folder import write_whole

LAUNCH = ".launch"
REFUSED = 2
ANSWER_S = 3.0


def claim(run: Path, launch: str, resume: bool) -> str:
    """Claim the directory; return why it cannot be claimed, or an empty string."""
    file = run / LAUNCH
    if file.is_file() and file.read_text() == launch:
        return ""
    has_started = run.is_dir() and any(path.name != ROSTER for path in run.iterdir())
    if has_started and not resume:
        return (
            f"{run} is on the volume already and belongs to another launch: launch with --resume "
            "to continue it, or name another directory with --output"
        )
    if resume and not has_started:
        return f"{run} is not on the volume, so there is nothing to resume: launch without --resume"
    run.mkdir(parents=True, exist_ok=True)
    write_whole(file, launch.encode())
    return ""


def forget_the_dead(roster: Path) -> list[str]:
    """Remove records of earlier launches' workers that do not answer; return their names."""
    with ThreadPoolExecutor(16) as pool:
        records = read_roster(roster)
        dead = [
            one
            for one, lives in zip(records, pool.map(_answers, records), strict=True)
            if not lives
        ]
    for record in dead:
        withdraw(roster, record)
    return [record.name for record in dead]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m composer_mesh.plugins.kubernetes.claim RUN LAUNCH [--resume]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("launch")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)
    if why := claim(given.run, given.launch, given.resume):
        sys.stderr.write(f"composer-mesh: {why}\n")
        return REFUSED
    forget_the_dead(given.run / ROSTER)
    return 0


def _answers(record: Record) -> bool:
    try:
        _, host, port = address.split(record.address)
        socket.create_connection((host, port), ANSWER_S).close()
    except (OSError, address.BadAddress):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
