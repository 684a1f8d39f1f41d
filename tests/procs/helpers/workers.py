"""Workers of a run, and networks between them that a test may cut, where that is permitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import cut_net
import pytest
from run_workers import Worker, worker

__all__ = ["Worker", "net", "worker"]


@contextmanager
def net(hosts: int = 2) -> Iterator[cut_net.Net]:
    """Hosts and a controller on a network of their own; skips where that is not permitted."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(cut_net.net(hosts))
        except cut_net.NotPermitted as error:
            pytest.skip(str(error))
        yield made
