"""The command that makes coding tasks. It imports its implementation when it runs."""

import argparse
import functools
from pathlib import Path

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import command, output, seconds


def _add_make_code_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="package of the index as NAME or NAME==VERSION, or its archive or folder",
    )
    output("where tasks are written", metavar="FILE")(parser)
    parser.add_argument(
        "--limit", type=int, metavar="N", help="maximum number of features of a package to try"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="number of boxes at once (default: the number of cores)",
    )
    parser.add_argument(
        "--heldout",
        action="append",
        default=[],
        metavar="NAME",
        help="package whose tasks are held out; may be repeated (default: every fifth)",
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="packages",
        metavar="NAME",
        help="installed package that boxes contain because tests need it; may be repeated",
    )
    parser.add_argument(
        "--folder",
        action="append",
        default=[],
        dest="folders",
        metavar="DIR",
        help="folder whose modules boxes contain; may be repeated",
    )
    parser.add_argument(
        "--index-url",
        action="append",
        default=[],
        metavar="URL",
        help="package index (default: PyPI)",
    )
    parser.add_argument(
        "--suite-s",
        type=seconds,
        default=240.0,
        metavar="S",
        help="seconds that a whole test suite may take (default: 240)",
    )
    parser.add_argument(
        "--generated",
        type=int,
        default=4,
        metavar="N",
        help="hidden cases of a function on inputs that no test has, 0 to 8 (default: 4)",
    )
    parser.add_argument(
        "--built-in",
        action="store_true",
        help="add the packages of the built-in set to the sources",
    )
    parser.add_argument(
        "--rename",
        action="store_true",
        help="rename functions and classes where the suite still passes with the new names",
    )
    parser.add_argument(
        "--bugs",
        type=int,
        default=0,
        metavar="N",
        help="make repair tasks too, with N bugs tried in each function (default: 0)",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help=(
            "make nothing: let the judge grade the original and the empty tree of each "
            "task, and with --output write the tasks that it grades correctly"
        ),
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="tasks that --check grades (default: all)"
    )
    parser.add_argument(
        "--gradings",
        type=int,
        default=1,
        metavar="N",
        help="times that --check grades each task (default: 1)",
    )


@command(
    "make coding tasks from source distributions",
    _add_make_code_tasks,
    group="tasks",
    example="make-code-tasks --built-in --output tasks.jsonl",
)
def make_code_tasks(arguments: argparse.Namespace) -> int:
    """Make coding tasks of source distributions, or check those of a file."""
    from composer_mesh.plugins.code_tasks.command import command
    from composer_mesh.plugins.code_tasks.command.sources import BUILT_IN

    options = command.MakeOptions(
        sources=(*arguments.sources, *(BUILT_IN if arguments.built_in else ())),
        output=arguments.output,
        limit=arguments.limit,
        jobs=arguments.jobs,
        heldout=tuple(arguments.heldout),
        packages=tuple(arguments.packages),
        folders=tuple(arguments.folders),
        indexes=tuple(arguments.index_url),
        suite_s=arguments.suite_s,
        generated=arguments.generated,
        bugs=arguments.bugs,
        rename=arguments.rename,
        check=arguments.check,
        sample=arguments.sample,
        gradings=arguments.gradings,
    )
    try:
        return command.make_code_tasks_command(options, functools.partial(print, flush=True))
    except command.MakeRefused as refused:
        raise UsageError(str(refused)) from refused
