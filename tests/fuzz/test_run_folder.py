"""Every command that reads a run directory, on directories that a stranger has prepared.

A command ends with a status, and where it fails with one plain line: never with a traceback, a
hang, a process, a signal, or a request to another machine. 240 directories are changed, each in
one file. Each is read by every command that opens this file, in a situation of the run (it is live,
it has ended, it is on another machine) in which the command opens it: both were found by letting
all commands read the unchanged run in all situations. A command that never opens the changed file
would show nothing.
"""

from __future__ import annotations

import asyncio
import io
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
from run_readers import (
    OF_SITUATIONS,
    PLACE,
    SEED,
    SITUATIONS,
    Openers,
    Reader,
    live,
    openers_of,
    readers_of,
)

from composer_mesh.actors.checkpoints.manifest import write_manifest, written
from composer_mesh.configs.schema import Config
from composer_mesh.services.directory.claim import STATE_HOME
from composer_mesh.services.directory.report import Evaluation, write_summary
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

CPU_S = 20.0
MEMORY = 2 << 30
PROGRAMS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "os.kill"}

Cases = Callable[[int], Iterator[int]]
Change = Callable[[Path], None]
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


CONFIG = Config.model_validate(
    {
        "data": {"task": "toolbox"},
        "run": {"name": "fuzzed", "seed": SEED, "steps": 3},
        "schedule": {"prompts_per_step": 1, "group_size": 3, "max_lag": 0},
        "late_rewards": {"max_age": 2},
        "sdpo": {"alpha": 0.1},
        "replay": replay_section(BUILTIN),
    }
)
READERS = readers_of(CONFIG)


@pytest.fixture(scope="module")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where this account keeps the key that signs the run's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_HOME, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def base(state_home: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run directory, as a run of this program leaves it."""
    root = tmp_path_factory.mktemp("base") / "run"
    task = ToolboxTask.create(TaskSettings(SEED))
    asyncio.run(write_run(root, CONFIG, [group_of(task, number) for number in range(2)], 1))
    asyncio.run(_more(root, CONFIG))
    checkpoint = root / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"w" * 100)
    write_manifest(checkpoint, 1, written(checkpoint, [checkpoint / "weights"]))
    write_summary(root, wall_s=2.0, configured=["policy"])
    (root / ".lock").write_text("4194000\n")
    return root


@pytest.fixture(scope="module")
def openers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Openers:
    """The readers of each file of the run, and when they open it."""
    folder = tmp_path_factory.mktemp("opened")
    with copied(base, folder) as run, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return openers_of(run, READERS, ends_plainly)


async def _more(root: Path, config: Config) -> None:
    with RunStore(root, config) as store:
        store.add_event("run_started", "", "it began", {"hosts": 1})
        store.add_event("actor_died", "generator-0", "killed")
        store.add_evaluation(Evaluation(0, 0.25, 8))
        await store.end_step(0, {"step": 1})


@pytest.fixture
def bounded(openers: Openers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that gets little memory, and whose commands may not use up the time."""
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
    run = folder / PLACE
    shutil.copytree(base, run, symlinks=True)
    try:
        yield run
    finally:
        shutil.rmtree(run)


def ends_plainly(read: Reader, run: Path) -> int:
    """Let a command read a run; it ends with a status and, where it fails, one plain line."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    _armed.append(True)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = read(run)
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
    base: Path, folder: Path, openers: Openers, rng: random.Random, file: str, change: Change
) -> None:
    """Change a file in a copy of the run, and let every command read it that opens this file."""
    when = {name: rng.choice(found) for name, found in openers[file].items()}
    if file in OF_SITUATIONS:
        only = rng.choice(sorted(set(when.values())))
        when = {name: only for name, found in openers[file].items() if only in found}
    with copied(base, folder) as run:
        for situation in sorted(set(when.values())):
            SITUATIONS[situation](run)
            if situation == min(when.values()):
                change(run / file)
            for name in (name for name in READERS if when.get(name) == situation):
                ends_plainly(READERS[name], run)
                shutil.rmtree(folder / "out", ignore_errors=True)


def test_a_run_that_nobody_changed_is_read_by_every_command(
    base: Path, bounded: None, tmp_path: Path
) -> None:
    with copied(base, tmp_path) as run:
        live(run)
        found = {name: ends_plainly(read, run) for name, read in READERS.items()}
    fail = {"stacks", "query", "scale", "join", "stop"}  # the run is not
    assert {name for name, status in found.items() if status} == fail


def test_every_file_of_a_run_that_commands_read_is_changed(base: Path, openers: Openers) -> None:
    """What no command opens is none of a stranger's ways in."""
    files = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}
    changed = {*FILES, "run.sqlite", *GROUPS, CHECKED}
    assert (files | {*OF_SITUATIONS}) & openers.keys() == changed
    assert all(openers[file] for file in changed)


FILES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "status.json": json_changed,
    "events.jsonl": lines_changed,
    "metrics.jsonl": lines_changed,
    "evaluations.jsonl": lines_changed,
    "config.toml": toml_changed,
    ".config.toml.signature": bytes_changed,
    "summary.json": json_changed,
    "checksums.json": json_changed,
    ".lock": bytes_changed,
    "checkpoints/step-1/manifest.json": json_changed,
    "launch.json": json_changed,
}

GROUPS = ("traces/000/000000.safetensors", "traces/000/000001.safetensors")
CHECKED = "checkpoints/step-1/weights"
"""Only its size and checksum are read, which its manifest states."""


@pytest.mark.parametrize("part", range(4))
def test_no_plain_file_breaks_a_command(
    base: Path, bounded: None, tmp_path: Path, openers: Openers, cases: Cases, part: int
) -> None:
    for seed in cases(30):
        rng = random.Random(f"plain {part} {seed}")
        name = rng.choice(sorted(FILES))

        def change(path: Path, rng: random.Random = rng, name: str = name) -> None:
            if rng.random() < 0.1 and name != "config.toml":  # the configs' own tests do that
                other_kind(rng, path)
            else:
                path.write_bytes(FILES[name](rng, path.read_bytes()))

        attack(base, tmp_path, openers, rng, name, change)


@pytest.mark.parametrize("part", range(2))
def test_no_group_file_breaks_a_command(
    base: Path, bounded: None, tmp_path: Path, openers: Openers, cases: Cases, part: int
) -> None:
    for seed in cases(30):
        rng = random.Random(f"group {part} {seed}")

        def change(path: Path, rng: random.Random = rng) -> None:
            how = rng.choice((arrays_changed, arrays_changed, arrays_changed, bytes_changed))
            if rng.random() < 0.05:
                other_kind(rng, path)
            else:
                group_replaced(path.parents[2], path, how(rng, path.read_bytes()))

        attack(base, tmp_path, openers, rng, rng.choice(GROUPS), change)


@pytest.mark.parametrize("part", range(2))
def test_no_store_breaks_a_command(
    base: Path, bounded: None, tmp_path: Path, openers: Openers, cases: Cases, part: int
) -> None:
    for seed in cases(30):
        rng = random.Random(f"store {part} {seed}")

        def change(store: Path, rng: random.Random = rng) -> None:
            path = store.with_name(store.name + rng.choice(("", "", "-wal", "-journal")))
            if rng.random() < 0.1:
                other_kind(rng, path)
            elif rng.random() < 0.3:
                store.write_bytes(bytes_changed(rng, store.read_bytes()))
            else:
                rows_changed(rng, store.parent)

        attack(base, tmp_path, openers, rng, "run.sqlite", change)
