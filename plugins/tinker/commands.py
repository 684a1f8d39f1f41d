"""The CLI command that serves models of clients.

Checks everything first; torch and Monarch are imported after that.
"""

import argparse
import functools
import os
from pathlib import Path

from pydantic import ValidationError

from composer_mesh.configs.load import load_config
from composer_mesh.mesh.environment import add_import_paths, prepare_environment
from composer_mesh.mesh.monarch_log import LOGS, open_log
from composer_mesh.mesh.private_folder import own_private_folder
from composer_mesh.planning.placement_solver import with_checkpointing
from composer_mesh.services.checks.accepting import UsageError, check_policy_files, use_umask
from composer_mesh.services.checks.hub import download_models, with_models
from composer_mesh.services.checks.keys import held_keys
from composer_mesh.services.commands.parser import (
    add_address,
    add_config,
    command,
    first_refused_option,
    output,
)
from composer_mesh.services.directory.claim import RUNS, claimed
from composer_mesh.services.directory.sft_start import started
from composer_mesh.services.pool.process_placement import ProcessPlacements
from composer_mesh.services.web.options import ListenOptions, ServeRefused


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    output(
        "where clients' models and the log of their operations are, with which a server continues "
        "after any end (default: runs/NAME-serve)"
    )(parser)
    add_address(parser, port=8100)
    parser.add_argument(
        "--key-env",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "environment variable with the key of a client, needed beyond loopback; may be "
            "given many times"
        ),
    )
    parser.add_argument(
        "--check", action="store_true", help="check only the config and the options; start nothing"
    )


@command(
    "serve training and sampling to clients of the Tinker protocol",
    _add_serve,
    many_files=True,
    group="servers",
    example="serve quickstart --port 8100",
)
def serve(arguments: argparse.Namespace) -> int:
    """Serve models of clients until Ctrl-C."""
    config = load_config(arguments.config, arguments.set)
    folder = arguments.output or RUNS / f"{config.run.name}-serve"
    if config.run.import_paths:
        add_import_paths(config.run.import_paths)
    try:
        options = ListenOptions(
            host=arguments.host,
            port=arguments.port,
            allowed_hosts=tuple(arguments.allow_host),
            any_address=arguments.any_address,
        )
        from composer_mesh.plugins.tinker.server.options import (
            check_serves,
            checked_keys,
            with_noted_commit,
        )
        from composer_mesh.services.web.http_server import listening_socket

        keys = checked_keys(options, arguments.key_env)
        check_serves(config)
        config = with_models(with_noted_commit(started(config), folder))
        # A served trainer stores activations where it is not configured to recompute them.
        config = with_checkpointing(config, False)
        check_policy_files(config)
        ProcessPlacements.of(config)
        if arguments.check:
            print(f"{config.run.name} can be served from {folder}")
            return 0
        listening_socket(options.host, options.port).close()  # refused before long imports
        if download_models(config):
            check_policy_files(config)
        use_umask(config)
        with claimed(folder), held_keys(config):
            _prepare(folder)
            from composer_mesh.plugins.tinker.server.command import serve_command

            say = functools.partial(print, flush=True)
            return serve_command(config, folder, options, keys, say)
    except ValidationError as error:
        raise UsageError(first_refused_option(error)) from None
    except ServeRefused as refused:
        raise UsageError(str(refused)) from refused


def _prepare(output: Path) -> None:
    """Prepare this process for actors: temporary files and logs in private folders."""
    prepare_environment()  # Monarch reads it when it is imported
    own_private_folder()
    os.environ[LOGS] = str((output / "logs").absolute())
    open_log("controller")
