"""Trains with a judge and readers on this machine: python -m judged_offers CONFIG [OPTIONS]"""

import subprocess
import sys
import threading
import time
from pathlib import Path

from judged_offers.judge import judge_server
from judged_offers.readers import COMMAND, post_opinions

EVERY_S = 5.0
"""Seconds between the visits of the readers."""


def train(config: str, options: list[str]) -> int:
    """Train while the judge answers and the readers post their opinions."""
    server = judge_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"judges.models.0.base_url=http://127.0.0.1:{server.server_port}/v1"
    run = Path("runs/judged-offers")
    command = [*COMMAND, "train", config, "--output", str(run), "--set", address, *options]
    training = subprocess.Popen(command)
    known: set[str] = set()
    while training.poll() is None:
        time.sleep(EVERY_S)
        if post_opinions(run, known):
            print(f"readers: {len(known)} opinions so far", flush=True)
    return training.returncode


if __name__ == "__main__":
    sys.exit(train(sys.argv[1], sys.argv[2:]))
