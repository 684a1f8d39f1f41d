"""The argument parser: commands, their arguments and their help. `cli` runs the commands."""

import argparse
from functools import cache
from importlib.metadata import version
from pathlib import Path

from composer_mesh.services.commands.ablate_arguments import add_ablate
from composer_mesh.services.commands.arguments import add_address, add_listen, add_set, seconds
from composer_mesh.services.commands.islands_arguments import add_island_job, add_islands
from composer_mesh.services.commands.task_arguments import (
    add_eval,
    add_make_code_tasks,
    add_new_task,
    add_play,
    add_serve_env,
)
from composer_mesh.services.directory.claim import RUNS, output_path
from composer_mesh.services.offline.options import add_options
from composer_mesh.services.traces.options import add_options as add_traces_options


@cache
def make_parser() -> argparse.ArgumentParser:
    """Return the command-line parser; its result has the name of the `command`."""
    parser = argparse.ArgumentParser(
        prog="composer-mesh",
        description="Train agentic language models in one supervised Monarch mesh.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("composer-mesh"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (about, add) in COMMANDS.items():
        add(commands.add_parser(name, help=about, allow_abbrev=False))
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    add_set(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="DIR",
        help="where the run is written; runs/NAME when not given, an earlier run there moves aside",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in that directory where it was stopped",
    )
    other.add_argument(
        "--auto-resume",
        action="store_true",
        help="go on with the run in that directory, or begin it; a finished one stays as it is",
    )
    other.add_argument(
        "--from-traces",
        type=Path,
        metavar="RUN",
        help="train on the rollouts that a run has stored, without generators",
    )
    other.add_argument(
        "--rollout-only",
        action="store_true",
        help="sample and store rollouts, without a trainer",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="DIR",
        help="clients' models and the log of their operations, with which a server goes on after "
        "any end; runs/NAME-serve when not given",
    )
    add_address(parser, port=8100)
    parser.add_argument(
        "--key-env",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable with the key of a client; needed beyond loopback; may be given "
        "many times",
    )
    parser.add_argument(
        "--check", action="store_true", help="only check the config and the options; start nothing"
    )


def _add_launch(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="DIR",
        help="the run's directory, the same on all hosts; runs/NAME when not given",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in that directory"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print every file and command; change nothing"
    )
    parser.add_argument(
        "--detach", action="store_true", help="do not follow the run's output until it ends"
    )


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        default="tls://auto:0",
        metavar="ADDRESS",
        help="tls://HOST:PORT or tcp://HOST:PORT; auto is this host's private address, port 0 a "
        "free one; tls://auto:0 by default",
    )
    parser.add_argument("--name", default="", help="of this host in the run; its own by default")
    parser.add_argument(
        "--roster", type=Path, metavar="DIR", help="folder in which workers announce themselves"
    )
    parser.add_argument(
        "--authority", type=Path, metavar="DIR", help="folder with ca.pem and ca.key; tls needs it"
    )
    parser.add_argument(
        "--lease",
        type=seconds,
        default=15.0,
        metavar="S",
        help="seconds without the controller after which all of the run here ends; 15 by default",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds to wait for the controller to come; 600 by default",
    )
    parser.add_argument(
        "--with-process", type=int, metavar="PID", help="end when this local process is gone"
    )
    parser.add_argument(
        "--subnet",
        action="append",
        default=[],
        metavar="CIDR",
        help="network whose addresses may be listened on; any private one by default; may be "
        "given many times",
    )
    parser.add_argument(
        "--any-address",
        action="store_true",
        help="listen on public addresses too, where whoever gets through may run any code",
    )


def _add_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a live run")
    parser.add_argument(
        "--now", action="store_true", help="without a checkpoint, in the middle of the step"
    )


def _add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a live run")
    parser.add_argument(
        "address", metavar="ADDRESS", help="where a worker listens, such as tls://10.0.0.7:22300"
    )


def _add_reward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run")
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a trace_id of its traces")
    parser.add_argument(
        "reward", nargs="?", type=float, metavar="REWARD", help="in place of its first one"
    )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="JSON lines with trace_id and reward, for many"
    )
    parser.add_argument(
        "--follow", type=Path, metavar="FILE", help="the same, and what is added until the run ends"
    )
    parser.add_argument(
        "--openenv",
        metavar="URL",
        help="post what an OpenEnv server tells of this run's episodes, until the run ends",
    )
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the server's token"
    )
    parser.add_argument("--source", default="", metavar="TEXT", help="who says so; kept with it")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="a run directory; the latest by default"
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="the directory of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_tree(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="keep drawing until Ctrl-C")


def _add_events(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--json", action="store_true", help="print each event as one JSON object")


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a live run")
    parser.add_argument(
        "sizes", nargs="+", metavar="KIND=N", help="replicas to have, for example generator=3"
    )


def _add_stacks(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--native", action="store_true", help="show calls of C code too")
    parser.add_argument("--json", action="store_true", help="print each process as one object")


def _add_query(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a live run")
    parser.add_argument("sql", metavar="SQL", help='for example "SELECT * FROM actors"')
    parser.add_argument("--json", action="store_true", help="print each row as one object")


def _add_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="?",
        type=Path,
        default=RUNS,
        metavar="RUNS_DIR",
        help="folder of run directories, or one of them; runs by default",
    )
    add_listen(parser, 8200)
    parser.add_argument(
        "--control", action="store_true", help="let visitors with the token stop and scale runs"
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of runs")
    parser.add_argument(
        "--out", type=output_path, default=Path("report.html"), metavar="FILE", help="report.html"
    )
    parser.add_argument(
        "--rollout",
        action="append",
        default=[],
        metavar="[RUN:]TRACE",
        help="a rollout to show, by trace_id or GROUP/SAMPLE; may be given many times",
    )
    parser.add_argument(
        "--samples", type=int, default=2, metavar="N", help="rollouts of each run without --rollout"
    )
    parser.add_argument(
        "--x", choices=("step", "tokens", "time", "usd"), default="step", help="axis of the curves"
    )
    parser.add_argument(
        "--smooth", type=float, default=0.0, metavar="W", help="weight of the past, 0 to below 1"
    )
    parser.add_argument("--title", default="", metavar="TEXT", help="names of the runs by default")


COMMANDS = {
    "check": (
        "print the resolved run and its mesh; plays a dry episode, starts nothing",
        _add_config,
    ),
    "verify": ("find what is damaged or missing in a run directory", _add_verify),
    "train": ("train and evaluate a run", _add_train),
    "new-task": ("write a package with a task of your own, ready to run", add_new_task),
    "make-code-tasks": ("make coding tasks of source distributions", add_make_code_tasks),
    "play": ("play an episode of a task in the terminal", add_play),
    "serve": ("train and sample models of clients of the Tinker protocol", _add_serve),
    "serve-env": ("offer a task to others as an OpenEnv and MCP server", add_serve_env),
    "eval": ("evaluate a config, a run, a checkpoint or an endpoint on a task", add_eval),
    "ablate": ("compare a run with and without its channels", add_ablate),
    "islands": ("train several runs that average their weights", add_islands),
    "island-job": ("what a job of `islands --on` runs", add_island_job),
    "launch": ("bring a run to its hosts, a cluster or the background", _add_launch),
    "worker": ("offer this host to a run", _add_worker),
    "stop": ("let a run write a checkpoint and end", _add_stop),
    "join": ("add a host to a run that goes on", _add_join),
    "replay": ("preference pairs from the traces of a run", add_options),
    "traces": ("the rollouts of a run: list, show and export them", add_traces_options),
    "reward": ("post a reward for a rollout of a run, also after training on it", _add_reward),
    "events": ("what happened in a run, or happens now", _add_events),
    "scale": ("more or fewer replicas in a run that goes on", _add_scale),
    "dashboard": ("runs, rollouts and comparisons in a browser, live", _add_dashboard),
    "report": ("runs as one HTML file to send to somebody", _add_report),
    "tree": ("show the live mesh of a run", _add_tree),
    "stacks": ("the Python stacks of every process of a live run", _add_stacks),
    "query": ("ask the telemetry of a live run in SQL", _add_query),
    "tui": ("open Monarch's own terminal interface on a live run", _add_run),
}
