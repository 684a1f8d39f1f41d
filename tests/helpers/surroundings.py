"""What a shell, a terminal, a proxy or a CI service sets, and tests run without."""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh.environment import IMPORT_PATHS, UMASK
from composer_mesh.mesh.private_folder import PRIVATE

TERMINAL = {"COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TERM", "TTY_COMPATIBLE"}
HUB = {"HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN"}
OF_A_RUN = {PRIVATE, IMPORT_PATHS, UMASK}
"""What a run sets for its processes, and another one started by them would use."""


def forget_surroundings() -> None:
    """Give this process, and those that it starts, no terminal, proxy or hub and the usual umask.

    Each has one thread for computing, as a run's placement has it on a small machine: sums of more
    threads have other last bits.
    """
    os.umask(0o022)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in [*os.environ]:
        if name in TERMINAL | HUB | OF_A_RUN or name.lower().endswith("_proxy"):
            del os.environ[name]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Undo what a test or the start of a run changes for the process and for all that it starts.

    The generators are seeded, since the tests before have drawn from them.
    """
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
    environment, folder, umask = dict(os.environ), Path.cwd(), os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)
    os.chdir(folder)
    tempfile.tempdir = None
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ |= environment


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
