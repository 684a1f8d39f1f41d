"""`composer-mesh serve` as a command on one folder, and its processes."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from commands import Process, forked
from live_run import RUN_DEADLINE_S, wait_until
from served_world import Client

from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config

CONFIG = Path(__file__).parents[4] / "configs" / "quickstart.toml"


class Server:
    """A server on one folder, which is started again after each end."""

    def __init__(self, place: Path, *settings: str) -> None:
        self._place, self.output = place, place / "served"
        self.settings = [
            f"policy.path={place / 'policy'}",
            "serve.keep_operations=true",
            "serve.save_every=2",
            "supervision.backoff_s=0.01",
            *settings,
        ]
        self._starts = 0

    def start(self) -> str:
        self._starts += 1
        settings = [word for one in self.settings for word in ("--set", one)]
        words = ("serve", str(CONFIG), "--output", str(self.output), "--port", "0", *settings)
        with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
            self.process: Process = forked(words, out, err, self._place)
        wait_until(lambda: self._address() != "", "a server", RUN_DEADLINE_S)
        return self._address()

    def _file(self, name: str) -> Path:
        return self._place / f"{name}-{self._starts}"

    def _address(self) -> str:
        found = re.search(r"serving quickstart at (\S+),", self._file("out").read_text())
        return "" if found is None else found.group(1)

    def told(self) -> str:
        """Return what all servers have printed."""
        return "".join(one.read_text() for one in self._place.glob("out-*"))

    def kill(self, name: str) -> None:
        """Kill the process of an actor."""
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # another one has ended since, or is a zombie
                if name in " ".join(one.cmdline()):
                    one.kill()
                    return
        raise AssertionError(f"no process of {name}")

    def worker_of(self, name: str) -> psutil.Process:
        """Return the process that computes for an actor, a child of the fork server."""
        title = re.compile(rf"composer-mesh {re.escape(name)}\b.* {self.process.pid}\s*")
        for one in psutil.process_iter(["cmdline"]):
            if title.fullmatch(" ".join(one.info["cmdline"] or ())):
                return one
        raise AssertionError(f"no process computes for {name}")

    def end(self, how: signal.Signals) -> int:
        os.kill(self.process.pid, how)
        return self.process.wait(RUN_DEADLINE_S)


async def answered(client: Client, accepted: Any) -> bytes:
    """Return an operation's answer, which is no error. Waits as long as a run may take."""
    end = time.monotonic() + RUN_DEADLINE_S
    while b"try_again" in (content := (await client.raw(accepted)).content):
        assert time.monotonic() < end, "an operation has no answer"
    assert b"error" not in content, content
    return content


def write_policy(folder: Path) -> None:
    """Write a policy of random weights."""
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    policy.save_policy(
        policy.build_model(load_config(CONFIG).policy, tokenizer, 1), tokenizer, folder
    )
