"""The program of every process that a run starts: Monarch's own bootstrap, deaf to Ctrl-C.

Ctrl-C is a message to the controller, which stops its children in order; a child that took it
itself would look like a crash. The first argument is the actor's name, for `ps`. No other set-up
happens here: what an actor needs, its `load` endpoint does.
"""

from __future__ import annotations

import runpy
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)
