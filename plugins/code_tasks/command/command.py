"""Makes coding tasks of source distributions, or grades those of a file by real tools and judge.

In the grading original work is worth 1, and empty work 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from composer_mesh.mesh.sandboxes.probes import open_sandbox
from composer_mesh.mesh.sandboxes.root import with_dependencies
from composer_mesh.plugins.code_tasks.command.needs import (
    NeedsUnresolved,
    install,
    installed_versions,
    needed_by,
    resolved_together,
)
from composer_mesh.plugins.code_tasks.command.sources import INDEX, SourceUnavailable, opened
from composer_mesh.plugins.code_tasks.making.features import spread
from composer_mesh.plugins.code_tasks.making.hidden_cases import MOST_OF_TARGET
from composer_mesh.plugins.code_tasks.making.make import Made, made_of
from composer_mesh.plugins.code_tasks.making.package import (
    MakingLimits,
    Package,
    PackageRefused,
    package_of,
)
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.rollouts.tasks import Episode, Outcome
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.sandbox import Sandbox, SandboxError
from composer_mesh.tasks.task import TaskSettings

HELD_OUT_EVERY = 5


@dataclass
class Results:
    """What came of each source that is done."""

    sources: Sequence[str]
    done: dict[str, Made | str] = field(default_factory=dict)

    @property
    def made(self) -> list[Made]:
        """The packages of which tasks could be tried, in the order of the sources."""
        found = [self.done.get(one) for one in self.sources]
        return [one for one in found if isinstance(one, Made)]

    @property
    def refused(self) -> dict[str, str]:
        """Why others could not be used."""
        return {one: why for one, why in self.done.items() if isinstance(why, str)}

    def write(self, path: Path, heldout: Sequence[str]) -> int:
        """Write all rows, held-out packages marked; return how many tasks these are.

        The file is there whole or not at all.
        """
        packages = sorted(one.package for one in self.made if one.tasks)
        apart = held_out(packages, heldout)
        tasks = sum(len(one.tasks) for one in self.made)
        if not tasks:
            return 0
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            for one in self.made:
                split = "heldout" if one.package in apart else "train"
                for row in one.rows:
                    marked = {**row, "split": split} if apart and "name" in row else row
                    file.write(json.dumps(marked, sort_keys=True) + "\n")
        temporary.replace(path)
        return tasks


def held_out(packages: Sequence[str], named: Sequence[str]) -> frozenset[str]:
    """Return the packages whose tasks are held out: the named ones, or each fifth.

    Of a single package none is: then tasks of it are, by `data.heldout_every`.

    >>> held_out(["a", "b", "c"], [])
    frozenset({'c'})
    """
    if named:
        return frozenset(named)
    if len(packages) < 2:
        return frozenset()
    return frozenset(packages[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or packages[-1:])


async def make_all(
    results: Results,
    sandbox: Sandbox,
    packages: Mapping[str, Package],
    *,
    limits: MakingLimits,
    limit: int | None,
    at_once: int,
    say: Callable[[str], None],
) -> None:
    """Make the tasks of packages, by the source of each. Waits for boxes.

    A package that cannot be used is reported.
    """
    slots = asyncio.Semaphore(at_once)

    async def one(source: str, package: Package) -> None:
        async with slots:
            try:
                made = await made_of(sandbox, package, limits, limit)
            except PackageRefused as error:
                _refuse(results, source, error, say)
                return
        results.done[source] = made
        figures = f"{len(made.tasks)} tasks of {made.candidates} candidates, {made.seconds:.0f} s"
        say(f"{source}: {figures}")

    await asyncio.gather(*(one(source, package) for source, package in packages.items()))


def read_all(
    results: Results,
    indexes: Sequence[str],
    in_boxes: Collection[str],
    at_once: int,
    say: Callable[[str], None],
) -> tuple[dict[str, Package], dict[str, list[Requirement]]]:
    """Return the packages by source, and what each and its tests need by its name.

    A source that cannot be used is reported. Asks the indexes.
    """

    def one(source: str) -> tuple[Package, list[Requirement]] | Exception:
        try:
            found = opened(source, indexes)
            package = package_of(found.name, found.version, found.sha256, found.files, in_boxes)
        except (PackageRefused, SourceUnavailable) as error:
            return error
        return replace(package, fewest_lines=found.fewest_lines), needed_by(found)

    packages, needs = {}, {}
    with ThreadPoolExecutor(at_once) as threads:
        for source, found in zip(results.sources, threads.map(one, results.sources), strict=True):
            if isinstance(found, Exception):
                _refuse(results, source, found, say)
                continue
            packages[source], needs[found[0].name] = found
    return packages, needs


def _refuse(results: Results, source: str, error: Exception, say: Callable[[str], None]) -> None:
    results.done[source] = str(error)
    say(f"{source}: refused: {error}")


HEAD = ("package", "tests", "stable", "candidates", "tasks", "values", "lines", "failing", "s")
WIDTH = 28


def table_of(results: Results) -> Iterator[str]:
    """Yield the lines of the table; lines and failing tests are medians of a task."""
    yield _line(*HEAD)
    for one in results.made:
        name = f"{one.package} {one.version}"
        counts = (one.tests, one.stable, one.candidates, len(one.tasks), one.with_cases)
        yield _line(name, *counts, one.median_lines, one.median_failing, round(one.seconds))
    every = [task for one in results.made for task in one.tasks]
    kinds = Counter(task["kind"] for task in every)
    candidates = sum(one.candidates for one in results.made)
    values = sum(one.with_cases for one in results.made)
    yield _line("all", "", "", candidates, len(every), values, "", "", "")
    yield "kinds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    reasons: Counter[str] = Counter()
    for one in results.made:
        reasons.update(one.refused)
    for reason, count in reasons.most_common():
        yield f"candidates refused: {count}: {reason}"
    for source, reason in results.refused.items():
        yield f"{source}: refused: {reason}"


def _line(name: str, *values: object) -> str:
    return f"{name:{WIDTH}}" + "".join(f"{value!s:>11}" for value in values)


SPLITS: tuple[Split, ...] = ("train", "heldout")
EMPTY = (call_text("submit", {}),)
ATTEMPTS = 3
REPORT_EVERY = 100
"""Tasks after which progress is reported."""


@dataclass(frozen=True)
class RightTasks:
    """Names of the tasks that were graded rightly each time, and whether these are all."""

    tasks: frozenset[str]
    all: bool


async def check_tasks(
    sandbox: Sandbox,
    path: Path,
    sample: int | None,
    gradings: int,
    at_once: int,
    say: Callable[[str], None],
) -> RightTasks:
    """Grade tasks of a file, and tell what is graded wrongly.

    Waits for boxes; raises SandboxError where one fails.
    """
    started = time.monotonic()
    task = CodeTask.create(TaskSettings(path=path, heldout_every=2, max_turns=100))
    await task.check_sandbox(sandbox)
    task.sandbox = sandbox
    rows = {task.identity(row): (split, row) for split in SPLITS for row in task.rows(split) or ()}
    names = list(rows) if sample is None else spread(list(rows), sample)
    slots = asyncio.Semaphore(at_once)

    async def one(name: str) -> tuple[str, list[str]]:
        async with slots:
            return name, await faults_of(task, *rows[name], gradings)

    wrong, right = 0, set[str]()
    for count, graded in enumerate(asyncio.as_completed([one(name) for name in names]), 1):
        name, faults = await graded
        right |= set() if faults else {name}
        for fault in faults:
            wrong += 1
            say(fault)
        if count % REPORT_EVERY == 0 and count < len(names):
            say(f"{count} of {len(names)} tasks graded ({time.monotonic() - started:.0f} s)")
    say(
        f"{len(names)} tasks graded {gradings} times: {wrong} gradings are wrong "
        f"({time.monotonic() - started:.0f} s)"
    )
    return RightTasks(frozenset(right), not wrong)


def copy_tasks(source: Path, target: Path, names: Collection[str]) -> int:
    """Write the tasks of a file that have these names, and the trees that they need; return how
    many tasks."""
    lines = source.read_text(encoding="utf-8").splitlines()
    rows = [(json.loads(line), line) for line in lines if line.strip()]
    tasks = [(row, line) for row, line in rows if row.get("name") in names]
    trees = {row.get("tree") for row, _ in tasks}
    kept = {line for _, line in tasks}
    kept |= {line for row, line in rows if "name" not in row and row.get("tree") in trees}
    target.write_text("".join(f"{line}\n" for _, line in rows if line in kept), encoding="utf-8")
    return len(tasks)


async def faults_of(task: CodeTask, split: Split, row: Row, gradings: int) -> list[str]:
    """Return what is wrong with the rewards of gold and of empty work on a task."""
    faults = []
    for _ in range(gradings):
        gold = await played(task, split, row, task.gold(row))
        if gold.reward != 1.0 or not gold.success:
            faults.append(f"{task.identity(row)}: original work is worth {gold.reward:g}")
        empty = await played(task, split, row, EMPTY)
        if empty.reward != 0.0 or empty.success:
            faults.append(f"{task.identity(row)}: empty work is worth {empty.reward:g}")
    return faults


async def played(task: CodeTask, split: Split, row: Row, actions: Sequence[str]) -> Outcome:
    """Play an episode with stated actions; return how it is scored.

    An episode whose box fails is played again; raises SandboxError where that happens each time.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(SandboxError):
            return await _played_once(task, split, row, actions)
    return await _played_once(task, split, row, actions)


async def _played_once(task: CodeTask, split: Split, row: Row, actions: Sequence[str]) -> Outcome:
    episode = RunningEpisode(task, Episode(task.name, split, 0, row), TaskCalls())
    try:
        await episode.begin()
        for action in actions:
            await episode.step(action)
        return await episode.outcome()
    finally:
        await episode.close()


Say = Callable[[str], None]
NEEDED = ("pytest",)
INTERRUPTED = 130


class MakeRefused(Exception):
    """The command cannot be carried out; the message says why."""


MOST_BUGS = 100


@dataclass(frozen=True)
class MakeOptions:
    """What the command line says."""

    sources: tuple[str, ...]
    output: Path | None
    limit: int | None
    jobs: int | None
    heldout: tuple[str, ...]
    packages: tuple[str, ...]
    folders: tuple[str, ...]
    indexes: tuple[str, ...]
    suite_s: float
    generated: int
    bugs: int
    rename: bool
    check: Path | None
    sample: int | None
    gradings: int


def make_code_tasks_command(options: MakeOptions, say: Say) -> int:
    """Make or check tasks; return 0, or 1 where no task was made or one is graded wrongly."""
    _refuse_unfit(options)
    if options.check is not None:
        with _boxes(options, say) as sandbox:
            jobs = options.jobs or os.cpu_count() or 1
            checking = check_tasks(
                sandbox, options.check, options.sample, options.gradings, jobs, say
            )
            right = asyncio.run(checking)
        if options.output is not None:
            say(f"wrote {copy_tasks(options.check, options.output, right.tasks):,} tasks")
        return 0 if right.all else 1
    return _make(options, say)


def _make(options: MakeOptions, say: Say) -> int:
    in_boxes = list(with_dependencies([*NEEDED, *options.packages]))
    output = options.output
    assert output is not None
    results, status = Results(options.sources), 0
    at_once = options.jobs or os.cpu_count() or 1
    packages, needs = read_all(results, options.indexes or (INDEX,), in_boxes, at_once, say)
    needed = _installed(options, output, packages, needs, in_boxes, say)
    options = replace(options, folders=(*options.folders, *needed))
    with _boxes(options, say) as sandbox:
        making = make_all(
            results,
            sandbox,
            packages,
            limits=MakingLimits(
                suite_s=options.suite_s,
                generated=options.generated,
                bugs=options.bugs,
                rename=options.rename,
            ),
            limit=options.limit,
            at_once=at_once,
            say=say,
        )
        try:
            asyncio.run(making)
        except KeyboardInterrupt:
            say("interrupted: what is done is written")
            status = INTERRUPTED
        except Exception:
            say("failed: what is done is written")
            results.write(output, options.heldout)
            raise
    tasks = results.write(output, options.heldout)
    for line in table_of(results):
        say(line)
    for name in sorted(set(options.heldout) - {one.package for one in results.made if one.tasks}):
        say(f"--heldout {name} is not a package with tasks: nothing of it is held out")
    if not tasks:
        say("no task was made, and nothing is written")
        return status or 1
    used = sum(bool(one.tasks) for one in results.made)
    say(f"wrote {tasks:,} tasks of {used} packages to {output}")
    if options.packages or options.folders:
        say("their boxes need, in [environment.sandbox.options]:")
        say(f"packages = {[*NEEDED, *options.packages]}")
        say(f"folders = {list(options.folders)}")
    return status


def _installed(
    options: MakeOptions,
    output: Path,
    packages: Mapping[str, Package],
    needs: Mapping[str, Sequence[Requirement]],
    in_boxes: Sequence[str],
    say: Say,
) -> list[str]:
    """Install what packages and their tests need; return the folder, or none if nothing is needed.

    No package of which tasks are made is in it, and none that boxes have anyway.
    """
    index_args = [
        part
        for place, url in enumerate(options.indexes)
        for part in ("--extra-index-url" if place else "--index-url", url)
    ]
    had = {canonicalize_name(one) for one in in_boxes}
    left_out = had | {canonicalize_name(one.name) for one in packages.values()}
    needs = {
        name: [one for one in these if canonicalize_name(one.name) not in had]
        for name, these in needs.items()
    }
    try:
        wheels = resolved_together(needs, installed_versions(in_boxes), left_out, index_args, say)
        if not wheels:
            return []
        folder = output.resolve().with_suffix(".packages")
        install(wheels, folder, index_args)
    except NeedsUnresolved as error:
        raise MakeRefused(f"the wheels that tests need cannot be installed: {error}") from None
    say(f"installed {len(wheels)} distributions that tests need into {folder}")
    return [str(folder)]


@contextmanager
def _boxes(options: MakeOptions, say: Say) -> Iterator[Sandbox]:
    """Open a sandbox that is attacked before its first use, and close it."""
    sandbox = open_sandbox(
        boxes=options.jobs or os.cpu_count() or 1,
        packages=[*NEEDED, *options.packages],
        folders=list(options.folders),
        bytecode=True,
    )
    say(next(sandbox.describe()))
    try:
        yield sandbox
    finally:
        asyncio.run(sandbox.close())


def _refuse_unfit(options: MakeOptions) -> None:
    _refuse_unfit_numbers(options)
    if options.check is not None:
        if options.sources:
            raise MakeRefused("--check grades the tasks of a file: name no SOURCE")
        if not options.check.is_file():
            raise MakeRefused(f"--check {options.check} is not a file: name one with coding tasks")
        if options.output is not None and options.output.resolve() == options.check.resolve():
            raise MakeRefused(f"--check reads {options.check}: name another file for --output")
        if options.output is not None:
            _refuse_unfit_output(options.output)
        return
    if not options.sources:
        raise MakeRefused("name a SOURCE, such as toolz or ./toolz-1.0.0.tar.gz")
    _refuse_unfit_output(options.output)
    twice = {one for one in options.sources if options.sources.count(one) > 1}
    if twice:
        raise MakeRefused(f"SOURCE {min(twice)} is named twice: name it once")


def _refuse_unfit_output(output: Path | None) -> None:
    if output is None or output.suffix != ".jsonl":
        raise MakeRefused(f"--output is {output}: name a file that ends in .jsonl")
    if not output.resolve().parent.is_dir():
        raise MakeRefused(f"--output {output} has no folder: make it, or name another")


def _refuse_unfit_numbers(options: MakeOptions) -> None:
    for name, value in _numbers(options):
        if value is not None and value < 1:
            raise MakeRefused(f"{name} is {value}: give 1 or more")
    if not 0 <= options.bugs <= MOST_BUGS:
        raise MakeRefused(f"--bugs is {options.bugs}: give 0 to {MOST_BUGS}")
    if not 0 <= options.generated <= MOST_OF_TARGET:
        raise MakeRefused(f"--generated is {options.generated}: give 0 to {MOST_OF_TARGET}")


def _numbers(options: MakeOptions) -> Sequence[tuple[str, int | None]]:
    return (
        ("--limit", options.limit),
        ("--jobs", options.jobs),
        ("--sample", options.sample),
        ("--gradings", options.gradings),
    )
