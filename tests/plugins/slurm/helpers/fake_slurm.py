"""Programs that stand for Slurm's: small scripts on a PATH, which do what files tell them.

With them the job of a run runs here, node by node, as if Slurm had started it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_S = 60.0
LOG = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >>{folder}/calls
"""
ANSWER = """cat {folder}/{name}.out 2>/dev/null
cat {folder}/{name}.err >&2 2>/dev/null
exit "$(cat {folder}/{name}.status 2>/dev/null || echo 0)"
"""
SRUN = r"""#!/bin/bash
if [ "$1" = --help ]; then cat {folder}/srun.help; exit 0; fi
printf '%s\n' "srun $*" >>{folder}/calls
while [[ $1 == --* ]]; do
  [[ $1 == --ntasks=* ]] && tasks=${{1#*=}}
  shift
done
echo $$ >{folder}/srun.pid
pids=()
trap 'kill "${{pids[@]}}"' TERM
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task "$@" &
  pids+=("$!")
done
for _ in 1 2; do wait; done
"""
SCANCEL = """
case "$*" in
  *--batch*) ;;
  *--signal=TERM*) kill "$(cat {folder}/srun.pid)" ;;
esac
"""
SLEEP = """#!/bin/sh
exec {sleep} 0.02
"""


@dataclass
class FakeSlurm:
    """A folder of programs; what they answer, and what they were called with."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("squeue", "scontrol", "sbatch", "sacct"):
            self._write(name, LOG + ANSWER)
        self._write("scancel", LOG + SCANCEL + ANSWER)
        self._write("srun", SRUN)
        self._write("sleep", SLEEP, sleep=_real("sleep"))
        self.knows_overlap(True)
        self.answers("squeue", "RUNNING\n")

    def knows_overlap(self, knows: bool) -> None:
        """Whether srun is of Slurm 20.11 or newer."""
        text = "  --overlap  Allow other steps to overlap this step\n" if knows else "  --share\n"
        (self.folder / "srun.help").write_text(text)

    def answers(self, name: str, out: str = "", *, status: int = 0, error: str = "") -> None:
        """What a program prints from now on, and how it ends."""
        (self.folder / f"{name}.out").write_text(out)
        (self.folder / f"{name}.err").write_text(error)
        (self.folder / f"{name}.status").write_text(str(status))

    def lacks(self, name: str) -> None:
        """A program that is not installed."""
        (self.folder / name).unlink()

    def calls(self, name: str = "") -> list[str]:
        """The calls of a program so far, each as one line."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(name)]

    def start(self, script: Path, **env: str) -> subprocess.Popen[str]:
        """Run a job's script as Slurm does on the first node."""
        job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", **env}
        process = subprocess.Popen(
            ["bash", str(script)],
            env={**os.environ, **self.path(), **job},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def path(self) -> Mapping[str, str]:
        """Where these programs come first."""
        return {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}

    def close(self) -> None:
        """End what a test has left running."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _write(self, name: str, text: str, **more: str) -> None:
        path = self.folder / name
        path.write_text(text.format(folder=shlex.quote(str(self.folder)), name=name, **more))
        path.chmod(0o755)


CONTROLLER = """
import json, os, pathlib, signal, sys, time
said = pathlib.Path({said!r})
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
if sys.argv[4] == "worker":
    sys.stdout.write("listens\\n"); sys.stdout.flush()
    (said / ("worker-" + sys.argv[-1])).write_text(json.dumps(sys.argv[1:]))
    while not told and not (said / "given back").exists():
        time.sleep(0.01)
    sys.exit(0)
(said / "controller").write_text(json.dumps(sys.argv[1:]))
end = time.monotonic() + 60
while time.monotonic() < end and not (said / "exit").exists():
    if told and not (said / "deaf").exists():
        sys.stdout.write("checkpoint\\n"); sys.exit(143)
    time.sleep(0.01)
sys.exit(int((said / "exit").read_text()))
"""


@dataclass
class FakeMesh:
    """An interpreter whose composer-mesh trains nothing, and what it was told."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        program = self.folder / "mesh.py"
        program.write_text(CONTROLLER.format(said=str(self.folder)))
        self.python = self.folder / "the python"
        command = shlex.join([sys.executable, str(program)])
        self.python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        self.python.chmod(0o755)

    def until(self, name: str) -> str:
        """Wait for something that a process has said; its words."""
        end = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists() or not (self.folder / name).read_text():
            assert time.monotonic() < end, f"{name} is not there after {DEADLINE_S:g} s"
            time.sleep(0.01)
        return (self.folder / name).read_text()

    def ends(self, status: int) -> None:
        """Let the controller end."""
        if status == 0:
            (self.folder / "given back").touch()
        draft = self.folder / "exit.draft"
        draft.write_text(str(status))
        draft.replace(self.folder / "exit")

    def deaf(self) -> None:
        """Let the controller heed no signal."""
        (self.folder / "deaf").touch()


def _real(name: str) -> str:
    return next(
        str(Path(folder) / name)
        for folder in os.environ["PATH"].split(os.pathsep)
        if (Path(folder) / name).exists()
    )
