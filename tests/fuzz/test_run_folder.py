"""Every command that reads a run directory, on directories that a stranger has prepared.

A command ends with a status, and where it fails with one plain line: never with a traceback, a
hang, a process, a signal, or a request to another machine. Each of 2,000 changed directories is
read by commands that open the changed file: by some of them, and by `make fuzz` by all.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from inspected_runs import group_of, write_run
from mutations import (
    arrays_changed,
    bytes_changed,
    group_replaced,
    json_changed,
    lines_changed,
    other_kind,
    rows_changed,
    toml_changed,
)
from offline_runs import BUILTIN, replay_section

from composer_mesh.actors.checkpoints.manifest import write_manifest, written
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.machine import this_host
from composer_mesh.services.cli import main
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.directory.status import ActorStatus, RunStatus, write_status
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.signatures import STATE_HOME
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

CPU_S = 20.0
MEMORY = 2 << 30
NOWHERE = "http://127.0.0.1:9"
PROGRAMS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "os.kill"}
TRACE = "train-000000-000"
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

Cases = Callable[[int], Iterator[int]]
_armed: list[bool] = []
_done: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what a command does besides reading and printing."""
    if not _armed:
        return
    if event in PROGRAMS:
        _done.append(f"{event} {arguments[:2]}")
    elif event == "socket.connect" and _is_elsewhere(arguments[1]):
        _done.append(f"{event} {arguments[1]}")


def _is_elsewhere(address: Any) -> bool:
    return isinstance(address, tuple) and address[0] != "127.0.0.1"


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run directory, as a run of this program leaves it."""
    root = tmp_path_factory.mktemp("base") / "run"
    config = Config.model_validate(
        {
            "data": {"task": "toolbox"},
            "run": {"name": "fuzzed", "seed": 3, "steps": 3},
            "schedule": {"prompts_per_step": 2, "group_size": 3, "max_lag": 0},
            "late_rewards": {"max_age": 2},
            "sdpo": {"alpha": 0.1},
            "replay": replay_section(BUILTIN),
        }
    )
    task = ToolboxTask.create(TaskSettings(3))
    asyncio.run(write_run(root, config, [group_of(task, number) for number in range(3)], 1))
    asyncio.run(_more(root, config))
    checkpoint = root / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * 100)
    write_manifest(checkpoint, 1, written(checkpoint, [checkpoint / "weights"]))
    actors = (ActorStatus("generator-0", "generator", None), ActorStatus("trainer", "trainer", 1))
    write_status(
        root,
        RunStatus(os.getpid(), NOWHERE, "train", 1, 3, 1, "shm", actors, host=this_host()),
    )
    (root / ".lock").write_text("4194000\n")
    return root


async def _more(root: Path, config: Config) -> None:
    with RunStore(root, config) as store:
        store.add_event("run_started", "", "it began", {"hosts": 1})
        store.add_event("actor_died", "generator-0", "killed")
        store.add_evaluation(Evaluation(0, 0.25, 8))
        await store.end_step(0, {"step": 1})


@pytest.fixture
def bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that gets little memory, and whose commands may not use up the time."""
    monkeypatch.setenv(STATE_HOME, str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    before = signal.signal(signal.SIGPROF, _too_long)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the command used {CPU_S:g} s of the processor")


@contextmanager
def copied(base: Path, folder: Path) -> Iterator[Path]:
    """A copy of the run, for one case."""
    run = folder / "run"
    shutil.copytree(base, run, symlinks=True)
    try:
        yield run
    finally:
        shutil.rmtree(run)


SHOWS: dict[str, tuple[str, ...]] = {
    "events": (),
    "events as json": ("--json",),
    "traces": (),
    "traces as json": ("--json", "--error", "unknown_tool"),
    "traces show": ("show", "0/0"),
    "traces show as json": ("show", TRACE, "--json", "--full"),
    "traces export": ("export", "--format", "jsonl", "--out", "out"),
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
"""Every command that reads a run directory, by what it is called here, and its words."""
OF_TRACES = [name for name in SHOWS if name.startswith("traces")]
OF_STATUS = ["events", "verify", "tree", "stacks", "query", "scale", "join", "stop"]
OPENERS: dict[str, list[str]] = {
    "status.json": OF_STATUS,
    "events.jsonl": ["events", "events as json", "tree"],
    "metrics.jsonl": ["verify", "stop"],
    "evaluations.jsonl": ["verify", "stop"],
    "config.toml": ["traces show", "traces show as json", "replay", "reward"],
    ".lock": ["events", "verify", "stop"],
    "checkpoints/step-1/manifest.json": ["verify"],
    "launch.json": [*OF_STATUS, "traces", "reward"],
    "traces": [*OF_TRACES, "verify", "replay"],
    "run.sqlite": [*OF_TRACES, "verify", "replay", "reward"],
}
"""The commands that open a file."""
SOME = 3
THOROUGH = int(os.environ.get("COMPOSER_MESH_FUZZ_FACTOR", "1")) > 1


def words_of(name: str, run: Path) -> list[str]:
    return [name.partition(" ")[0], str(run), *SHOWS[name]]


def ends_plainly(words: list[str]) -> int:
    """Run a command; fail unless it ends with a status and, where it fails, one plain line."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    _armed.append(True)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(words)
            out.flush()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _armed.clear()
    err.flush()
    said = err.buffer.getvalue().decode()
    errors = [line for line in said.splitlines() if line.startswith("composer-mesh: ")]
    assert "Traceback" not in said
    assert isinstance(status, int)
    if status == 2:
        assert errors, f"status {status} without a reason"
    assert len(errors) <= 2, said
    assert not _done, _done
    return status


def attack(
    base: Path, folder: Path, rng: random.Random, file: str, change: Callable[[Path], None]
) -> None:
    """Let commands read a copy of the run in which a file was changed."""
    names = OPENERS[file]
    if not THOROUGH:
        names = sorted(rng.sample(names, min(SOME, len(names))), key=names.index)
    with copied(base, folder) as run:
        change(run)
        for name in names:
            ends_plainly(words_of(name, run))
    shutil.rmtree(folder / "out", ignore_errors=True)


def test_a_run_that_nobody_changed_is_read_by_every_command(
    base: Path, bounded: None, tmp_path: Path
) -> None:
    with copied(base, tmp_path) as run:
        found = {name: ends_plainly(words_of(name, run)) for name in SHOWS}
    live = {"stacks", "query", "scale", "join", "stop"}  # the run is not
    assert {name for name, status in found.items() if status} == live


FILES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "status.json": json_changed,
    "events.jsonl": lines_changed,
    "metrics.jsonl": lines_changed,
    "evaluations.jsonl": lines_changed,
    "config.toml": toml_changed,
    ".lock": bytes_changed,
    "checkpoints/step-1/manifest.json": json_changed,
    "launch.json": json_changed,
}


@pytest.mark.parametrize("part", range(4))
def test_no_plain_file_breaks_a_command(
    base: Path, bounded: None, tmp_path: Path, cases: Cases, part: int
) -> None:
    for seed in cases(250):
        rng = random.Random(f"plain {part} {seed}")
        name = rng.choice(sorted(FILES))

        def change(run: Path, rng: random.Random = rng, name: str = name) -> None:
            path = run / name
            if name == "launch.json":
                (run / "status.json").unlink()
                path.write_text(json.dumps(LAUNCH))
            if rng.random() < 0.1 and name != "config.toml":  # the configs' own tests do that
                other_kind(rng, path)
            else:
                path.write_bytes(FILES[name](rng, path.read_bytes()))

        attack(base, tmp_path, rng, name, change)


@pytest.mark.parametrize("part", range(2))
def test_no_group_file_breaks_a_command(
    base: Path, bounded: None, tmp_path: Path, cases: Cases, part: int
) -> None:
    for seed in cases(250):
        rng = random.Random(f"group {part} {seed}")

        def change(run: Path, rng: random.Random = rng) -> None:
            path = path_of(run, rng.randrange(2))
            how = rng.choice((arrays_changed, arrays_changed, arrays_changed, bytes_changed))
            if rng.random() < 0.05:
                other_kind(rng, path)
            else:
                group_replaced(run, path, how(rng, path.read_bytes()))

        attack(base, tmp_path, rng, "traces", change)


@pytest.mark.parametrize("part", range(2))
def test_no_store_breaks_a_command(
    base: Path, bounded: None, tmp_path: Path, cases: Cases, part: int
) -> None:
    for seed in cases(250):
        rng = random.Random(f"store {part} {seed}")

        def change(run: Path, rng: random.Random = rng) -> None:
            path = run / ("run.sqlite" + rng.choice(("", "", "-wal", "-journal")))
            if rng.random() < 0.1:
                other_kind(rng, path)
            elif rng.random() < 0.3:
                store = run / "run.sqlite"
                store.write_bytes(bytes_changed(rng, store.read_bytes()))
            else:
                rows_changed(rng, run)

        attack(base, tmp_path, rng, "run.sqlite", change)
