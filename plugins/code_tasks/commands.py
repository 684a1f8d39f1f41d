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
        help="a package of the index as NAME or NAME==VERSION, or an archive or folder of one",
    )
    output("where tasks are written", metavar="FILE")(parser)
    parser.add_argument(
        "--limit", type=int, metavar="N", help="features of a package that are tried at most"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="boxes at once; as many as there are cores by default"
    )
    parser.add_argument(
        "--heldout",
        action="append",
        default=[],
        metavar="NAME",
        help="a package whose tasks are held out; may be repeated; each fifth when not given",
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="packages",
        metavar="NAME",
        help="an installed package that boxes have, because tests need it; may be repeated",
    )
    parser.add_argument(
        "--folder",
        action="append",
        default=[],
        dest="folders",
        metavar="DIR",
        help="a folder whose modules boxes have; may be repeated",
    )
    parser.add_argument(
        "--index-url", action="append", default=[], metavar="URL", help="PyPI by default"
    )
    parser.add_argument(
        "--suite-s", type=seconds, default=240.0, metavar="S", help="for a whole suite; 240"
    )
    parser.add_argument(
        "--generated",
        type=int,
        default=4,
        metavar="N",
        help="hidden cases of a function on inputs that no test has, 0 to 8; 4",
    )
    parser.add_argument(
        "--built-in", action="store_true", help="the packages of the built-in set as sources"
    )
    parser.add_argument(
        "--rename",
        action="store_true",
        help="give functions and classes other names, where the suite passes as before with them",
    )
    parser.add_argument(
        "--bugs",
        type=int,
        default=0,
        metavar="N",
        help="repair tasks too: bugs that are tried in each function; 0",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="make nothing: let the judge grade the original and the empty tree of each task, and "
        "with --output write those that are graded rightly",
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="tasks that --check grades; all by default"
    )
    parser.add_argument(
        "--gradings", type=int, default=1, metavar="N", help="times --check grades each; 1"
    )


@command(
    "make coding tasks of source distributions",
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
