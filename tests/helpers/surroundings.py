"""What a shell, a terminal, a proxy or a CI service sets, and tests run without."""

from __future__ import annotations

import os
import socket

import pytest

TERMINAL = {"COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TERM", "TTY_COMPATIBLE"}
HUB = {"HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN"}


def forget_surroundings() -> None:
    """Give this process, and those that it starts, no terminal, proxy or hub and the usual umask.

    Each has one thread for computing, as a run's placement has it on a small machine: sums of more
    threads have other last bits.
    """
    os.umask(0o022)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in [*os.environ]:
        if name in TERMINAL | HUB or name.lower().endswith("_proxy"):
            del os.environ[name]


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


NEEDS_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
