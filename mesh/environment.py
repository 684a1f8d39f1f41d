"""Environment variables that a process needs before Monarch or transformers is imported.

Imports neither Monarch nor torch, so that a command may call it first and stay fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

SETTINGS = {
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "8",
    # Limits Monarch's own waits for unreachable hosts to a minute.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "30s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "60s",
    # py-spy from Monarch's TUI asks a process first, and a later answer ends the controller.
    "HYPERACTOR_MESH_ADMIN_QUERY_CHILD_TIMEOUT": "3s",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Processes share the cores: a thread that spins while it waits takes another's core.
    "OMP_WAIT_POLICY": "passive",
}

PYSPY = "PYSPY_BIN"
"""Environment variable with the path of py-spy, which Monarch reads too."""
UMASK = "COMPOSER_MESH_UMASK"
"""Environment variable with the umask of a run's processes, in octal digits."""
PRIVATE_UMASK, GROUP_UMASK = "077", "027"
IMPORT_PATHS = "COMPOSER_MESH_IMPORT_PATHS"
"""Environment variable with the folders of the user's own modules."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Python's own variable: nothing is imported from the folder where a process is started."""

# Messages of Monarch's native code that users cannot act on.
NOISE = (
    b"Monarch internal logs are being written to",
    b"[RdmaXcel]",
    b"libcuda.so.1",
    b"Mesh admin server listening on",
    b"  - Root node:     curl",
    b"  - Mesh tree:     curl",
    b"  - API docs:      curl",
    b"hyperactor_mesh_admin_tui",
)

_one_capture = threading.Lock()


def prepare_environment() -> None:
    """Set variables that libraries read once, on import; the user's own values take precedence.

    Child processes inherit them, so it is called once, by the process that starts the others.
    """
    os.environ[SAFE_PATH] = "1"
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if (path := program_next_to_python("py-spy")) is not None:
        os.environ.setdefault(PYSPY, path)


def python_module(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of ours, by this interpreter or another.

    Every interpreter that runs one is started by it: without `-P` Python imports first from the
    folder where it is started, which may hold an `inspect.py` of somebody else.
    """
    return [python, "-P", "-m", module, *arguments]


def python_code(code: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a text of ours, isolated from variables and folders of users."""
    return [python, "-I", "-c", code, *arguments]


def program_next_to_python(program: str) -> str | None:
    """Return the path of a program in this Python's own folder, which may not be on PATH."""
    path = Path(sys.executable).with_name(program)
    return str(path) if path.exists() else None


def set_umask(umask: str | None = None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the umask of this process and the processes of its run; by default what its starter set.

    Without either, only the user can read what the run writes.
    """
    environ[UMASK] = umask or environ.get(UMASK, PRIVATE_UMASK)
    os.umask(int(environ[UMASK], 8))


def add_import_paths(
    folders: Sequence[Path], environ: MutableMapping[str, str] = os.environ
) -> None:
    """Let this process and its children import the user's modules from these folders too."""
    known = [path for path in environ.get(IMPORT_PATHS, "").split(os.pathsep) if path]
    added = [str(folder.absolute()) for folder in folders]
    environ[IMPORT_PATHS] = os.pathsep.join(dict.fromkeys([*known, *added]))
    use_import_paths(environ)


def use_import_paths(environ: Mapping[str, str] = os.environ) -> None:
    """Search the folders of the user's modules last: none of them hides another module."""
    paths = environ.get(IMPORT_PATHS, "").split(os.pathsep)
    sys.path += [path for path in paths if path and path not in sys.path]


def class_environment(kind: type) -> dict[str, str]:
    """Return the variables with which a process imports a class from where this one did.

    A class of the main module is sent as it is; modules next to a script are found too. Raises
    TypeError for a class of a module without a file, which no process can import.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return {}
    module = sys.modules[kind.__module__]
    file = getattr(module, "__file__", None)
    if file is None and kind.__module__ != "__main__":
        raise TypeError(
            f"{kind.__name__} is a class of the module {kind.__module__!r}, which has no file, so "
            "that no process can import it: write it to a file, as %%writefile my_actors.py does "
            "in a notebook, and import it from there"
        )
    folder = Path.cwd() if file is None else Path(file).absolute().parent
    if file is not None and kind.__module__ != "__main__":
        inside = kind.__module__.count(".") + (Path(file).stem == "__init__")
        folder = (folder, *folder.parents)[inside]
    if str(folder) not in {str(Path(path).absolute()) for path in sys.path}:
        return {}  # `python -P` does not search it
    known = [os.environ[IMPORT_PATHS]] if os.environ.get(IMPORT_PATHS) else []
    return {IMPORT_PATHS: os.pathsep.join([*known, str(folder)])}


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Filter Monarch's harmless native messages out of the terminal while a block runs.

    Native code writes to the file descriptors, bypassing `sys.stdout` and `sys.stderr`. All other
    lines are written when the block ends. The block holds a process-wide lock: never await in it.
    """
    with _one_capture, _filtered(1), _filtered(2):
        yield


@contextlib.contextmanager
def _filtered(descriptor: int) -> Iterator[None]:
    with tempfile.TemporaryFile() as captured:
        _flush()
        saved = os.dup(descriptor)
        os.dup2(captured.fileno(), descriptor)
        try:
            yield
        finally:
            _flush()
            os.dup2(saved, descriptor)
            os.close(saved)
            captured.seek(0)
            _write_again(descriptor, captured.read())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _write_again(descriptor: int, captured: bytes) -> None:
    lines = captured.splitlines(keepends=True)
    kept = [line for line in lines if not any(words in line for words in NOISE)]
    if any(line.strip() for line in kept):
        os.write(descriptor, b"".join(kept))
