"""The oldest and the newest SDK of the served range call everything; 8 clients survive 20 kills."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from serve_audit import audit
from served_process import ROOT, Sdk, Server, run_script

from composer_mesh.configs.load import load_config

VERSIONS = ("0.25.0", "0.38.0")
CLIENTS, KILLS, SEED = 8, 20, 7
SCRIPT = "client_under_kills.py"
UPDATES = ["forward_backward", "forward_backward", "optim_step"]
"""What a client does in each round."""

Told = list[list[dict[str, Any]]]
"""What each client has printed."""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_is_served(sdk: Sdk, serve: Callable[..., Server], version: str) -> None:
    server = serve()
    script = run_script(sdk(version), "acceptance.py", server.url)
    told, _ = script.communicate(timeout=300)
    assert script.returncode == 0
    assert json.loads(told.splitlines()[-1]) == {"sdk": version, "passed": True}
    server.stop()


def test_no_update_is_lost_or_doubled_by_kills_under_eight_clients(
    sdk: Sdk, serve: Callable[..., Server]
) -> None:
    rng, rounds = random.Random(SEED), 40
    server = serve("serve.keep_operations=true", "serve.save_every=7", *RESTARTS)
    clients = [
        run_script(
            sdk(VERSIONS[n % 2]),
            SCRIPT,
            server.url,
            str(n),
            str(rounds),
            key=f"tml-{n}",
        )
        for n in range(CLIENTS)
    ]
    told: Told = [[] for _ in clients]
    readers = [
        threading.Thread(target=read, args=(client, lines))
        for client, lines in zip(clients, told, strict=True)
    ]
    for one in readers:
        one.start()
    killed: dict[str, int] = {}
    for _ in range(KILLS):
        wait_for_progress(told, rng.randrange(1, 8), clients)
        what = rng.choice(["trainer", "trainer", "trainer", "sampler", "server"])
        killed[what] = killed.get(what, 0) + 1
        kill(server, what)
    for client, reader in zip(clients, readers, strict=True):
        assert client.wait(600) == 0
        reader.join()
    assert sum(killed.values()) == KILLS
    server.stop()
    ends = {one[-1]["model"]: one[-1] for one in told}
    assert len(ends) == CLIENTS
    (policy,) = (ROOT / ".cache" / "composer-mesh").glob("warm-start-*")
    paths = {model: end["path"] for model, end in ends.items()}
    config = load_config(ROOT / "configs" / "quickstart.toml")
    kinds = audit(server.output, config, policy, paths)
    assert all(one == UPDATES * rounds for one in kinds.values())


RESTARTS = (
    "supervision.restarts=1000",
    "supervision.backoff_s=0.05",
    "supervision.backoff_max_s=0.1",
)


def wait_for_progress(told: Told, steps: int, clients: list[subprocess.Popen[str]]) -> None:
    """Wait until the clients have made some more steps together, or are done."""
    until = sum(map(len, told)) + steps
    limit = time.monotonic() + 300
    while sum(map(len, told)) < until and any(one.poll() is None for one in clients):
        assert time.monotonic() < limit, "the clients hang"
        time.sleep(0.01)


def read(client: subprocess.Popen[str], lines: list[dict[str, Any]]) -> None:
    """Keep what a client prints, line by line, until it ends."""
    assert client.stdout is not None
    with client.stdout as output:
        for line in output:
            lines.append(json.loads(line))  # noqa: PERF401  others read it meanwhile


def kill(server: Server, what: str) -> None:
    """Kill a process of the server, once there is one, or the server, which is started again."""
    assert server.process is not None
    if what == "server":
        server.kill()
        server.start()
        return
    limit = time.monotonic() + 60
    while not killed_one(server.process.pid, what):
        assert time.monotonic() < limit, f"there is no {what} to kill"
        time.sleep(0.05)


def killed_one(pid: int, what: str) -> bool:
    for one in psutil.Process(pid).children(recursive=True):
        try:
            if any(word.startswith(what) for word in one.cmdline()):
                one.kill()
                return True
        except psutil.Error:
            continue
    return False
