"""A package of somebody else, and an environment of its own in which it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

POLITE = '''
import random

from composer_mesh import Channel, ChannelSample, Command, Message, Section, TrackedRun, TrackedStep
from composer_mesh import Row, Task, Transcript, reward
from composer_mesh.configs.load import load_config


class Manners(Section):
    """How it greets."""

    greeting: str = "hello"


def arguments(parser):
    parser.add_argument("config")
    parser.add_argument("--to", default="all")


def run(arguments):
    print(f"{load_config(arguments.config).section(Manners).greeting} {arguments.to}")
    return 0


greet = Command("greet", arguments, run)


class Echo(Task):
    def __init__(self, words: int) -> None:
        self.words = words

    def generate(self, rng: random.Random) -> Row:
        return {"text": " ".join(rng.choices(("one", "two", "three"), k=self.words))}

    def prompt(self, row: Row) -> str:
        return row["text"]

    def expert(self, messages: list[Message]) -> str:
        return messages[-1]["content"]

    @reward
    def same(self, transcript: Transcript) -> float:
        return float(transcript.answer == transcript.row["text"])


class Likely(Channel):
    def samples(self, traces):
        for one in traces:
            yield ChannelSample(one.trace_id, [float(own) for own in one.action_mask()])

    def loss(self, rows):
        return -(rows.values * rows.logprobs).sum(), {}


class Notes:
    def __init__(self, file: str) -> None:
        self.file = file

    def _write(self, text: str) -> None:
        with open(self.file, "a") as notes:
            notes.write(f"{text}\\n")

    def start(self, run: TrackedRun) -> str:
        self._write(f"start {run.config['manners']['greeting']}")
        return self.file

    def log(self, step: TrackedStep) -> None:
        self._write(f"step {step.step}")

    def finish(self, state: str) -> None:
        self._write(state)
'''
"""A module with one object of each kind."""

REGISTERS = {
    "composer_mesh.commands": "greet = polite:greet",
    "composer_mesh.config_sections": "manners = polite:Manners",
    "composer_mesh.tasks": "echo = polite:Echo",
    "composer_mesh.trackers": "notes = polite:Notes",
    "composer_mesh.channels": "likely = polite:Likely",
}
CONFIG = """
[run]
name = "strangers"
steps = 1

[data]
task = "echo"
options = {words = 5}

[manners]
greeting = "good day"

[[tracking]]
type = "notes"
kwargs = {file = "notes.txt"}

[channels.likely]
import_path = "likely"
weight = 0.5

[replay]
beta = 0.0

[schedule]
prompts_per_step = 2
group_size = 2

[policy.warm_start]
steps = 2
demonstrations = 10
error_rate = 0.0

[eval]
episodes = 2
"""
"""A run that uses all of them."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that imports what is installed here, and the package of `source`."""

    folder: Path
    source: Path = ROOT / "src"

    @classmethod
    def make(cls, folder: Path, source: Path = ROOT / "src") -> Environment:
        venv.create(folder, symlinks=True)
        made = cls(folder, source)
        seen_too = [str(source), sysconfig.get_path("purelib")]
        (made.packages / "seen_too.pth").write_text("\n".join(seen_too))
        return made

    @classmethod
    def with_polite(cls, folder: Path) -> Environment:
        """An environment in which the package is installed."""
        made = cls.make(folder)
        install(made.packages, "polite", {"polite.py": POLITE}, REGISTERS)
        return made

    @property
    def packages(self) -> Path:
        """Where its packages are installed."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `composer-mesh` in a folder."""
        command = [str(self.folder / "bin" / "python"), "-m", "composer_mesh", *words]
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )


def install(
    place: Path, name: str, files: Mapping[str, str], entry_points: Mapping[str, str]
) -> None:
    """Write a package's modules and metadata as pip does; `entry_points` are lines by group."""
    for file, text in files.items():
        (place / file).write_text(text)
    about = place / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [f"[{group}]\n{lines}\n" for group, lines in entry_points.items()]
    (about / "entry_points.txt").write_text("\n".join(groups))
