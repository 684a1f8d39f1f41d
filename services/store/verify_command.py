"""The `composer-mesh verify` command: prints the faults of a run directory, one per line."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from composer_mesh.services.directory.live import goes_on
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.verification import CHECKED, NOT_CHECKED, verify_run


def verify_command(run: Path, as_json: bool = False) -> int:
    """Print the findings; return exit status 1 if there are any."""
    found = verify_run(run, live=goes_on(run))
    if as_json:
        findings = [asdict(one) for one in found]
        sys.stdout.write(json.dumps({"run": str(run), "findings": findings}, indent=2) + "\n")
        return int(bool(found))
    for one in found:
        sys.stdout.write(plain_text(str(one)) + "\n")
    if not found:
        checked = f"{', '.join(CHECKED)} are as they were written"
        sys.stdout.write(f"{run}: {checked}; not checked: {NOT_CHECKED}\n")
    return int(bool(found))
