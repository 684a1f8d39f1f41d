"""GGUF files as models: each is converted once, into a folder of the cache by its content."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from composer_mesh.configs.errors import ConfigError, one_line, shown
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.programs import ProgramFailed, run

PROGRAM, NOTE = "composer_mesh.actors.models.gguf_program", "gguf.json"
LONGEST_S = 86_400.0


def folder_by(digest: str, cache: Path) -> Path:
    """Return the folder of a file with this SHA-256, whether or not it was converted."""
    return (cache / f"gguf-{digest[:16]}").absolute()


def converted(file: Path, cache: Path, key: str) -> Path:
    """Return the folder of a file's model in float32. Waits for the conversion where it is new.

    Raises ConfigError; a folder that was written partially is never used.
    """
    with file.open("rb") as content:
        folder = folder_by(hashlib.file_digest(content, "sha256").hexdigest(), cache)
    if folder.exists():
        return folder
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        why = f"reading it needs {missing[0]}: pip install 'composer-mesh[gguf]'"
        raise _refused(key, file, why)
    sys.stderr.write(f"composer-mesh: {key}: {file.name} is converted into {folder}\n")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = Path(scratch) / "model"
        try:
            done = run(
                python_module(PROGRAM, str(file.absolute()), str(place)), deadline_s=LONGEST_S
            )
        except ProgramFailed as error:
            raise _refused(key, file, f"its conversion failed: {error.said[-300:]}") from None
        if why := json.loads(done.stdout).get("error"):
            raise _refused(
                key, file, f"transformers cannot read it ({why}): give a folder with safetensors"
            )
        if not folder.exists():
            shutil.move(place, folder)
    return folder


def remark(folder: Path) -> str:
    """Return what the weights of a converted folder are; nothing for another folder."""
    try:
        note = json.loads((folder / NOTE).read_text())
    except FileNotFoundError:
        return ""
    return (
        f"float32 weights of {note['file']}, dequantized from {', '.join(note['types'][:4])}: not "
        "those of the original model"
    )


def _refused(key: str, file: Path, why: str) -> ConfigError:
    return ConfigError(one_line(f"{key} = {shown(str(file))}: {why}"))
