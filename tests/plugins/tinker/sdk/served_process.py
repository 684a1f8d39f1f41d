"""A server as a user starts it, and scripts that use an SDK against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[4]
START_S = 300.0

Sdk = Callable[[str], Path]
"""Returns the interpreter of an environment with a version of the SDK."""


class Server:
    """A `composer-mesh serve` of the quickstart's policy on a folder, which can be killed."""

    def __init__(self, output: Path, *more: str) -> None:
        self.output, self._more = output, more
        self.port, self._log = 0, output.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "composer_mesh", "serve", "configs/quickstart.toml"]
        settings = [word for one in self._more for word in ("--set", one)]
        where = ["--output", str(self.output), "--port", str(self.port)]
        with self._log.open("ab") as log:
            seen = log.tell()
            self.process = subprocess.Popen(
                [*command, *where, *settings], cwd=ROOT, stdout=log, stderr=log
            )
        self.port = self._port(seen)

    def _port(self, seen: int) -> int:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process is not None
            text = self._log.read_bytes()[seen:].decode()
            if " at http://127.0.0.1:" in text:
                return int(text.split(" at http://127.0.0.1:")[1].split(",")[0])
            assert self.process.poll() is None, text
            time.sleep(0.1)
        raise AssertionError(f"no server within {START_S:g} s: {self._log.read_text()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self._log.read_text()


def run_script(
    python: Path, script: str, *arguments: str, key: str = "tml-test"
) -> subprocess.Popen[str]:
    """Start a script of this folder with an SDK."""
    return subprocess.Popen(
        [str(python), str(Path(__file__).with_name(script)), *arguments],
        env={
            **os.environ,
            "TINKER_API_KEY": key,
            "TINKER_TELEMETRY": "0",
            "PYTHONPATH": str(ROOT / "src"),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
