"""Arguments of the commands that concern tasks: new-task, make-code-tasks, play and others."""

import argparse
from pathlib import Path

from composer_mesh.services.commands.arguments import add_address, add_set, dollars, seconds
from composer_mesh.services.directory.claim import output_path


def add_new_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the package, such as my_task")
    parser.add_argument(
        "--folder",
        type=output_path,
        metavar="DIR",
        help="where it is written; ./NAME when not given; must be new or empty",
    )


def add_make_code_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a package of the index as NAME or NAME==VERSION, or an archive or folder of one",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where tasks are written")
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


def add_play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        metavar="TASK|CONFIG",
        help="as in data.task, such as my_task.py:MyTask; or a TOML file",
    )
    parser.add_argument(
        "--episode",
        type=int,
        default=0,
        metavar="N",
        help="which one, from 0; the first by default",
    )
    parser.add_argument(
        "--split", choices=("train", "heldout"), default="train", help="train by default"
    )
    parser.add_argument(
        "--scripted",
        default="",
        metavar="expert|FILE",
        help="the task's expert acts, or a file with an action a line, in place of a person",
    )
    add_set(parser)


def add_serve_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        metavar="TASK|CONFIG",
        help="as in data.task, such as my_task.py:MyTask; or a TOML file",
    )
    add_address(parser, port=8000)
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that share the port; 1 by default"
    )
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with the token that clients send; needed beyond loopback",
    )
    parser.add_argument(
        "--session-timeout",
        type=seconds,
        default=900.0,
        metavar="S",
        help="seconds without a request after which a session ends; 900 by default",
    )
    parser.add_argument(
        "--max-sessions", type=int, default=10_000, metavar="N", help="at once; 10000 by default"
    )
    add_set(parser)


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="CONFIG|RUN|CHECKPOINT|URL",
        help="a TOML file, the directory of a run, a model folder, or an OpenAI-compatible URL",
    )
    parser.add_argument(
        "--task",
        metavar="TASK|CONFIG",
        help="as in data.task, or a TOML file; for URLs, and model folders outside of a run",
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="K", help="of each episode; 1 by default"
    )
    parser.add_argument("--json", type=output_path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="DIR",
        help="where traces are stored; runs/NAME-eval when not given, an earlier one moves aside",
    )
    parser.add_argument(
        "--resume", action="store_true", help="play only what is not stored in that directory"
    )
    parser.add_argument(
        "--policy",
        choices=("gold", "empty"),
        help="play the task's own gold actions, or empty answers, in place of a config's model",
    )
    parser.add_argument("--model", metavar="NAME", help="of the model that a URL serves")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key of a URL"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=1024, metavar="N", help="of a URL's answer; 1024"
    )
    parser.add_argument(
        "--max-usd", type=dollars, metavar="USD", help="ceiling of what a URL may cost in all"
    )
    for name, tokens in (("--prompt-usd", "prompt"), ("--completion-usd", "answer")):
        about = f"a URL's price of a million {tokens} tokens, which --max-usd needs"
        parser.add_argument(name, type=dollars, metavar="USD", help=about)
    parser.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="requests to a URL at once; 16"
    )
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="S", help="of a URL's answer; 120"
    )
    add_set(parser)
