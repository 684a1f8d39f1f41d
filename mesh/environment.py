"""The settings that a process needs before Monarch or transformers is first imported in it.

Only environment variables and the two output streams: nothing here imports Monarch or torch, so
that a command may call it first and stay fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

SETTINGS = {
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "8",
    # Beside hosts that answer no more, so that none of Monarch's own waits is longer than a minute.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "30s",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "60s",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Several processes share the cores: a thread that spins while it waits takes another's core.
    "OMP_WAIT_POLICY": "passive",
}

# Lines of Monarch's native code that a reader of a run can do nothing about.
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
    """Set what libraries read once, when they are first imported; a user's own value wins.

    Child processes inherit it, so it is called once, by the process that starts the others.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if (beside := Path(sys.executable).with_name("py-spy")).exists():
        os.environ.setdefault("PYSPY_BIN", str(beside))  # bin of a venv may not be on PATH


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Keep Monarch's harmless native messages out of the terminal while a block runs.

    Native code writes to the file descriptors, past `sys.stdout` and `sys.stderr`. All other lines
    are written again when the block ends. The block holds a lock of the process: never await in it.
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
