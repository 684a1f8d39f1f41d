"""Makes coding tasks of source distributions, or lets the judge grade those of a file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.mesh.sandboxes.probes import open_sandbox
from composer_mesh.mesh.sandboxes.root import with_dependencies
from composer_mesh.plugins.code_tasks.command.checking import check_tasks, copy_tasks
from composer_mesh.plugins.code_tasks.command.making import Results, make_all
from composer_mesh.plugins.code_tasks.command.sources import INDEX
from composer_mesh.plugins.code_tasks.command.table import table_of
from composer_mesh.plugins.code_tasks.making.hidden_cases import MOST_OF_TARGET
from composer_mesh.plugins.code_tasks.making.survey import MakingLimits
from composer_mesh.tasks.sandbox import Sandbox

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
    assert options.output is not None
    results, status = Results(options.sources), 0
    with _boxes(options, say) as sandbox:
        making = make_all(
            results,
            sandbox,
            indexes=options.indexes or (INDEX,),
            in_boxes=in_boxes,
            limits=MakingLimits(
                suite_s=options.suite_s,
                generated=options.generated,
                bugs=options.bugs,
                rename=options.rename,
            ),
            limit=options.limit,
            at_once=options.jobs or os.cpu_count() or 1,
            say=say,
        )
        try:
            asyncio.run(making)
        except KeyboardInterrupt:
            say("interrupted: what is done is written")
            status = INTERRUPTED
        except Exception:
            say("failed: what is done is written")
            results.write(options.output, options.heldout)
            raise
    tasks = results.write(options.output, options.heldout)
    for line in table_of(results):
        say(line)
    for name in sorted(set(options.heldout) - {one.package for one in results.made if one.tasks}):
        say(f"--heldout {name} is no package with tasks: nothing of it is held out")
    if not tasks:
        say("no task was made, and nothing is written")
        return status or 1
    used = sum(bool(one.tasks) for one in results.made)
    say(f"wrote {tasks:,} tasks of {used} packages to {options.output}")
    if options.packages or options.folders:
        packages, folders = [*NEEDED, *options.packages], list(options.folders)
        say("their boxes need, in [environment.sandbox.options]:")
        say(f"packages = {packages}")
        say(f"folders = {folders}")
    return status


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
            raise MakeRefused(f"--check {options.check} is no file: name one with coding tasks")
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
