"""The handle file of a launched run, and the commands that its user can enter.

It is in the run's directory as the launcher sees it; its paths are those on the controller's host.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_mesh.services.directory.live import RunUnavailable, commands_for
from composer_mesh.services.launch.ports import Handle
from composer_mesh.services.store.whole_files import write_whole

LAUNCH_FILE = "launch.json"
THERE = "COMPOSER_MESH_REACHED"
"""Environment variable of a command forwarded to the controller: the user's path of the run."""
PATHS = ("run", "folder", "log")


def write_handle(place: Path, handle: Handle) -> None:
    """Write a handle to the run's directory atomically."""
    about = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(handle).items()
    }
    write_whole(place / LAUNCH_FILE, (json.dumps(about, indent=1) + "\n").encode())


def read_handle(place: Path) -> Handle | None:
    """Return the handle of a run, None if it was not launched. Raises `RunUnavailable`."""
    file = place / LAUNCH_FILE
    try:
        about: dict[str, Any] = json.loads(file.read_text())
        for name in PATHS:
            about[name] = None if about[name] is None else Path(about[name])
        return Handle(**about | {"reach": tuple(about["reach"])})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunUnavailable(
            f"{file} says no more where the run is ({error}): put it back from a copy, or remove "
            "it where the run is on this machine"
        ) from None


def called(run: Path) -> Path:
    """Return the user's path of a run, which may be on another machine than this process."""
    return Path(os.environ.get(THERE) or run)


def resume_command(run: Path) -> str:
    """Return the command line that resumes a stopped run."""
    place, program, config = called(run), "train", "config.toml"
    if (run / LAUNCH_FILE).exists() or THERE in os.environ:
        program, config = "launch", "launch/config.toml"
    words = ["composer-mesh", program, str(place / config), "--output", str(place), "--resume"]
    return shlex.join(words)


def hints(place: Path, handle: Handle, telemetry: bool) -> list[str]:
    """Return the command lines that a user may need for a launched run."""
    resume = ["composer-mesh", "launch", str(place / "launch" / "config.toml")]
    lines = [
        *commands_for(place, telemetry),
        f"{shlex.join([*resume, '--output', str(place), '--resume'])}   # when it was stopped",
    ]
    if handle.log is not None:
        lines.append(f"tail -F {shlex.quote(str(handle.log))}")
    return lines
