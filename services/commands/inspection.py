"""CLI commands on existing runs: inspect or change a live one, or read a finished one.

Each imports its implementation when it runs.
"""

import argparse
import functools

from pydantic import ValidationError

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.arguments import first_refused_option
from composer_mesh.services.offline.options import read_options
from composer_mesh.services.replay.post_reward import post_rewards, read_posts
from composer_mesh.services.schedule.signals import CommandSignals


def tree(arguments: argparse.Namespace) -> int:
    """Show the live mesh of a run, or of several islands."""
    from composer_mesh.services.inspection.tree import tree_command
    from composer_mesh.services.islands.directory import islands_in

    if arguments.run is not None and (place := islands_in(arguments.run)) is not None:
        from composer_mesh.services.islands.tree import islands_tree

        return islands_tree(place, arguments.json, arguments.watch)
    return int(tree_command(arguments.run, arguments.json, arguments.watch))


def dashboard(arguments: argparse.Namespace) -> int:
    """Serve a page of the runs below a folder until Ctrl-C."""
    from composer_mesh.services.dashboard.options import NEEDED, DashboardOptions
    from composer_mesh.services.web.options import ServeRefused, check_installed

    try:
        options = DashboardOptions(
            folder=arguments.runs,
            host=arguments.host,
            port=arguments.port,
            allowed_hosts=tuple(arguments.allow_host),
            any_address=arguments.any_address,
            control=arguments.control,
        )
        check_installed(NEEDED, "dashboard")
        from composer_mesh.services.dashboard.command import dashboard_command

        say = functools.partial(print, flush=True)
        return dashboard_command(options, arguments.token_env, say)
    except ValidationError as error:
        raise UsageError(first_refused_option(error)) from None
    except ServeRefused as refused:
        raise UsageError(str(refused)) from refused


def report(arguments: argparse.Namespace) -> int:
    """Write runs as one HTML file."""
    from composer_mesh.services.dashboard.report import (
        ReportOptions,
        ReportRefused,
        report_command,
    )

    try:
        options = ReportOptions(
            tuple(arguments.runs),
            arguments.out,
            arguments.x,
            arguments.smooth,
            tuple(arguments.rollout),
            arguments.samples,
            arguments.title,
        )
        return report_command(options, functools.partial(print, flush=True))
    except ReportRefused as refused:
        raise UsageError(str(refused)) from refused


def events(arguments: argparse.Namespace) -> int:
    """Show the events of a run, also while it is running."""
    from composer_mesh.services.inspection.events_command import events_command

    return events_command(arguments.run, arguments.follow, arguments.json)


def scale(arguments: argparse.Namespace) -> int:
    """Change the number of replicas of a live run."""
    from composer_mesh.services.scale_command import scale_command

    return scale_command(arguments.run, arguments.sizes)


def stacks(arguments: argparse.Namespace) -> int:
    """Show the Python stacks of each process of a live run."""
    from composer_mesh.services.inspection.inspect_commands import stacks_command

    return stacks_command(arguments.run, arguments.native, arguments.json)


def query(arguments: argparse.Namespace) -> int:
    """Query the telemetry of a live run."""
    from composer_mesh.services.inspection.inspect_commands import query_command

    return query_command(arguments.run, arguments.sql, arguments.json)


def tui(arguments: argparse.Namespace) -> int:
    """Open Monarch's own terminal interface on a live run."""
    from composer_mesh.services.inspection.inspect_commands import tui_command

    return tui_command(arguments.run)


def replay(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Query teachers about the states of stored traces; no mesh is started."""
    options = read_options(arguments)
    from composer_mesh.services.offline.command import replay_command

    return replay_command(options, signals)


def traces(arguments: argparse.Namespace) -> int:
    """List, show or export the rollouts that a run has stored."""
    from composer_mesh.services.traces.command import traces_command

    return traces_command(arguments)


def reward(arguments: argparse.Namespace) -> int:
    """Post a reward for a stored rollout of a run, also after it was trained on."""
    one = [value for value in (arguments.trace, arguments.reward) if value is not None]
    many = [one for one in (arguments.file, arguments.follow, arguments.openenv) if one is not None]
    if (len(one), len(many)) not in ((2, 0), (0, 1)):
        raise UsageError(
            "reward takes TRACE and REWARD, --file FILE, --follow FILE or --openenv URL: give one "
            "of them"
        )
    if arguments.openenv is not None:
        return _follow_server(arguments)
    if arguments.follow is not None:
        from composer_mesh.services.replay.reward_queue import follow_rewards

        return follow_rewards(arguments.run, arguments.follow, arguments.source)
    posts = read_posts(arguments.file) if arguments.file else {one[0]: one[1]}
    post_rewards(arguments.run, posts, arguments.source)
    return 0


def _follow_server(arguments: argparse.Namespace) -> int:
    from composer_mesh.services.replay.served_rewards import follow_server
    from composer_mesh.tasks.openenv.options import read_options
    from composer_mesh.tasks.openenv.server import Server

    given = {"url": arguments.openenv}
    options = read_options(
        given | {"token_env": arguments.token_env} if arguments.token_env else given
    )
    server = Server(options, options.headers(), options.connect_s)
    return follow_server(arguments.run, server, arguments.source or f"server {options.url}")


def verify_run(arguments: argparse.Namespace) -> int:
    """Report damaged, missing and left-over files, rows and checkpoints of a run directory."""
    from composer_mesh.services.store.verify_command import verify_command

    return verify_command(arguments.run, arguments.json)
