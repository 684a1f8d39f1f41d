"""The commands of the dashboard. Each imports its implementation when it runs."""

import argparse
import functools
from pathlib import Path

from pydantic import ValidationError

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import (
    add_listen,
    command,
    first_refused_option,
    output,
)
from composer_mesh.services.directory.claim import RUNS
from composer_mesh.services.directory.status import run_or_newest


def _add_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="?",
        type=Path,
        default=RUNS,
        metavar="RUNS_DIR",
        help="folder of run directories, or one run directory (default: runs)",
    )
    add_listen(parser, 8200)
    parser.add_argument(
        "--control", action="store_true", help="let visitors with the token stop and scale runs"
    )


@command(
    "show runs, rollouts and comparisons in a browser, live",
    _add_dashboard,
    many_files=True,
    group="runs",
    example="dashboard runs --port 8200",
)
def dashboard(arguments: argparse.Namespace) -> int:
    """Serve a page of the runs below a folder until Ctrl-C."""
    from composer_mesh.services.web.options import ServeRefused

    try:
        from composer_mesh.plugins.dashboard.app import DashboardOptions, dashboard_command

        options = DashboardOptions(
            folder=arguments.runs,
            host=arguments.host,
            port=arguments.port,
            allowed_hosts=tuple(arguments.allow_host),
            any_address=arguments.any_address,
            control=arguments.control,
        )
        say = functools.partial(print, flush=True)
        return dashboard_command(options, arguments.token_env, say)
    except ValidationError as error:
        raise UsageError(first_refused_option(error)) from None
    except ServeRefused as refused:
        raise UsageError(str(refused)) from refused


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help=f"run directories (default: the newest in {RUNS}/)",
    )
    output("where the page is written (default: report.html)", metavar="FILE")(parser)
    parser.add_argument(
        "--rollout",
        action="append",
        default=[],
        metavar="[RUN:]TRACE",
        help="rollout to show, by trace_id or GROUP/SAMPLE; may be given many times",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=2,
        metavar="N",
        help="number of rollouts of each run without --rollout",
    )
    parser.add_argument(
        "--x", choices=("step", "tokens", "time", "usd"), default="step", help="axis of the curves"
    )
    parser.add_argument(
        "--smooth",
        type=float,
        default=0.0,
        metavar="W",
        help="smoothing of the curves: weight of the past, from 0 to below 1",
    )
    parser.add_argument(
        "--title",
        default="",
        metavar="TEXT",
        help="title of the page (default: the names of the runs)",
    )


@command(
    "write runs as one HTML file to share",
    _add_report,
    many_files=True,
    group="runs",
    example="report runs/quickstart --output report.html",
)
def report(arguments: argparse.Namespace) -> int:
    """Write runs as one HTML file."""
    from composer_mesh.plugins.dashboard.report import (
        ReportOptions,
        ReportRefused,
        report_command,
    )

    try:
        options = ReportOptions(
            tuple(arguments.runs or [run_or_newest(None)]),
            arguments.output or Path("report.html"),
            arguments.x,
            arguments.smooth,
            tuple(arguments.rollout),
            arguments.samples,
            arguments.title,
        )
        return report_command(options, functools.partial(print, flush=True))
    except ReportRefused as refused:
        raise UsageError(str(refused)) from refused
