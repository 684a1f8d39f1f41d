"""Stands in for an interpreter with composer-mesh: a worker and a controller that train nothing.

    fake_mesh.py -P -m composer_mesh worker --roster DIR --name NAME ...
    fake_mesh.py -P -m composer_mesh train CONFIG --output RUN --auto-resume

They keep the promises that the job relies on: rosters, exit statuses, one line of metrics for each
step. `RUN/launch/config.toml` says how the controller behaves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

LOOK_S = 0.05
FINISHED, FAILED, INTERRUPTED = 0, 1, 143


def value_of(option: str) -> str:
    return sys.argv[sys.argv.index(option) + 1]


def worker() -> int:
    roster, name = Path(value_of("--roster")), value_of("--name")
    roster.mkdir(parents=True, exist_ok=True)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    about = {"name": name, "node": os.environ.get("SLURMD_NODENAME"), "pid": os.getpid()}
    (roster / f"{name}.json").write_text(json.dumps(about))
    print(f"composer-mesh worker {name} listens", flush=True)
    while not told and not (roster.parent / "ended").exists():
        time.sleep(LOOK_S)
    return FINISHED


def train() -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    run, config = Path(value_of("--output")), tomllib.loads(Path(sys.argv[5]).read_text())
    (run / "controller.pid").write_text(str(os.getpid()))
    metrics = run / "metrics.jsonl"
    while len(list((run / "hosts").glob("*.json"))) < config["hosts"] and not told:
        time.sleep(LOOK_S)
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    print(f"goes on after step {done}", flush=True)
    while done < config["steps"]:
        if told and not config.get("deaf"):
            print(f"checkpoint at step {done}", flush=True)
            return INTERRUPTED
        if done >= config.get("fails_at", config["steps"]):
            print("cannot go on", flush=True)
            return FAILED
        time.sleep(config["step_s"])
        if done < config.get("hangs_at", config["steps"]):
            done += 1
            with metrics.open("a") as file:
                file.write(json.dumps({"step": done}) + "\n")
            print(f"step {done}", flush=True)
    (run / "ended").touch()
    print("finished", flush=True)
    return FINISHED


def say() -> int:
    """Any other command, as one that is reached from outside."""
    print(json.dumps({"said": sys.argv[4:], "folder": str(Path.cwd()), "pid": os.getpid()}))
    return FINISHED


if __name__ == "__main__":
    sys.exit({"worker": worker, "train": train}.get(sys.argv[4], say)())
