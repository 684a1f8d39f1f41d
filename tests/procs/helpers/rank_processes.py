"""Processes of ranks, forked from a server that has imported what a run's fork server has.

It must not import the modules of the ranks' work: they import Monarch, whose threads a fork lacks,
with whatever a thread held when the process was forked.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

from composer_mesh.services.run.preload import PRELOAD


def run_ranks(work: Callable[..., None], given: tuple[Any, ...], count: int) -> None:
    """Call `work(rank, *given)` in a process of each rank, and wait for their ends.

    A rank that crashes, by SIGABRT for example, leaves its stacks on stderr.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD])
    start_processes(_run, (work, *given), nprocs=count, start_method="forkserver")


def _run(rank: int, work: Callable[..., None], *given: Any) -> None:
    faulthandler.enable()
    work(rank, *given)
