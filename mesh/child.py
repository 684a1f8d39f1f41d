"""The program of every process that a run starts: Monarch's own bootstrap, deaf to Ctrl-C.

Ctrl-C is a message to the controller, which stops its children in order; a child that took it
itself would look like a crash. The first argument is the actor's name, for `ps`. No other set-up
happens here: what an actor needs, its `load` endpoint does.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from monarch._rust_bindings.monarch_hyperactor import bootstrap

serve = bootstrap.bootstrap_main


async def serve_and_end() -> None:
    """Serve until the controller stops this process, then end it at once.

    Python's own end would race with Monarch's threads: pending tasks, aborts, both noisy.
    """
    code: int = await serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bootstrap.bootstrap_main = serve_and_end
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
