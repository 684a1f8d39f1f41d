"""Every command that reads a run directory, in the situations of a run, and what each opens."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.machine import this_host
from composer_mesh.plugins.ablation.plan import Ablation, PlannedRun, refuse_other_runs
from composer_mesh.plugins.ablation.report import ablation_report, write_report
from composer_mesh.services.cli import REFUSALS, main
from composer_mesh.services.directory.resume import describe_resume, refuse_unfit
from composer_mesh.services.directory.status import ActorStatus, RunStatus, write_status

NOWHERE = "http://127.0.0.1:9"
TRACE = "train-000000-000"
ARM, SEED = "whole", 3
PLACE = Path(ARM) / f"seed-{SEED}"
"""Where a run is in its ablation."""
LAUNCH = {
    "kind": "hosts",
    "run": "/far/run",
    "job": "1",
    "python": "python",
    "folder": "/far",
    "log": None,
    "destination": "far",
    "options": ["-x"],
    "setup": [],
    "context": "",
    "namespace": "",
    "reach": ["touch", "ran"],
}

WORDS: dict[str, tuple[str, ...]] = {
    "events": (),
    "events as json": ("--json",),
    "traces": (),
    "traces as json": ("--json", "--error", "unknown_tool"),
    "traces show": ("show", "0/0"),
    "traces show as json": ("show", TRACE, "--json", "--full"),
    "traces export": ("export", "--format", "jsonl", "--output", "out"),
    "verify": (),
    "replay": ("--dry-run",),
    "tree": ("--json",),
    "stacks": (),
    "query": ("SELECT 1",),
    "scale": ("generator=2",),
    "join": ("tls://127.0.0.1:9",),
    "stop": (),
    "reward": (TRACE, "0.5"),
}
"""The commands that read a run directory and start no run, by a name here, and their words."""

Reader = Callable[[Path], int]


def command(name: str, run: Path) -> int:
    return main([name.partition(" ")[0], str(run), *WORDS[name]])


def resumed(config: Config, run: Path) -> int:
    """Read a run as `train --resume` does before it starts anything, and when it stops."""
    return _refused(lambda: (refuse_unfit(run, config), describe_resume(run, config.run.steps)))


def compared(config: Config, run: Path) -> int:
    """Read a run as `ablate` does, which trains it if it is not finished, and reports on it."""
    plan = Ablation(Path("a.toml"), (), config, (ARM,), (SEED,), (PlannedRun(ARM, SEED, config),))
    output = run.parents[1]

    def work() -> None:
        refuse_other_runs(plan.runs, output)
        write_report(ablation_report(plan, output), output)

    return _refused(work)


def _refused(work: Callable[[], object]) -> int:
    """The exit status of what a command does, as the command line makes it."""
    try:
        work()
    except REFUSALS as error:
        print(f"composer-mesh: {error}", file=sys.stderr)
        return 2
    return 0


def readers_of(config: Config) -> dict[str, Reader]:
    """Every reader of a run with this config, by name."""
    found: dict[str, Reader] = {name: partial(command, name) for name in WORDS}
    return found | {
        "train --resume": partial(resumed, config),
        "ablate": partial(compared, config),
    }


def live(run: Path) -> None:
    """A run of this process."""
    _write_status(run, "train", os.getpid())


def ended(run: Path) -> None:
    _write_status(run, "finished", 4194000)


def elsewhere(run: Path) -> None:
    """A run that was launched on another machine."""
    (run / "status.json").unlink(missing_ok=True)
    (run / "launch.json").write_text(json.dumps(LAUNCH))


def _write_status(run: Path, state: str, pid: int) -> None:
    (run / "launch.json").unlink(missing_ok=True)
    actors = (ActorStatus("generator-0", "generator", None), ActorStatus("trainer", "trainer", 1))
    write_status(run, RunStatus(pid, NOWHERE, state, 1, 3, 1, "shm", actors, host=this_host()))


SITUATIONS: dict[str, Callable[[Path], None]] = {
    "live": live,
    "ended": ended,
    "elsewhere": elsewhere,
}
OF_SITUATIONS = ("status.json", "launch.json")
"""The files in which situations differ."""

Openers = Mapping[str, Mapping[str, list[str]]]
"""For each file the readers that open it, each with the situations in which it does."""


class Opened:
    """Notes which files below a directory are opened."""

    def __init__(self) -> None:
        self._root, self.files = "", set[str]()
        sys.addaudithook(self._note)

    @contextmanager
    def below(self, root: Path) -> Any:
        self._root, self.files = f"{root}{os.sep}", set()
        yield self.files
        self._root = ""

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._root or event not in ("open", "sqlite3.connect"):
            return
        path = arguments[0]
        if isinstance(path, str | os.PathLike) and self._root in (text := os.fspath(path)):
            self.files.add(text.partition(self._root)[2].partition("?")[0])


def openers_of(run: Path, readers: Mapping[str, Reader], ends: Callable[..., int]) -> Openers:
    """Let each reader read a run in each situation; `ends` calls one."""
    opened, found = Opened(), defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for situation, arrange in SITUATIONS.items():
        arrange(run)
        for name, read in readers.items():
            with opened.below(run) as files:
                ends(read, run)
            for file in (file for file in files if (run / file).is_file()):
                found[file][name].append(situation)
    return found
