"""Checks a command's config before anything is started, and parses option values.

Loads neither torch nor Monarch, so that a refusal is immediate.
"""

import argparse
from importlib.util import find_spec

from composer_mesh.actors.engines.vllm_checks import check_vllm_fits, check_vllm_installed
from composer_mesh.actors.mcp_servers.servers import with_tools
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.integrations.trackers.port import TrackerRefused
from composer_mesh.mesh.environment import GROUP_UMASK, PRIVATE_UMASK, add_import_paths, set_umask
from composer_mesh.mesh.islands.lighthouse import check_torchft
from composer_mesh.planning.model_refusals import LoraMissing, LowbitMissing
from composer_mesh.services.checks.custom_functions import check_custom_functions
from composer_mesh.services.checks.keys import check_keys
from composer_mesh.services.checks.policy_folder import check_policy_files, check_policy_template
from composer_mesh.services.checks.task import check_task
from composer_mesh.services.checks.trackers import check_run_trackers
from composer_mesh.services.pool.process_placement import ProcessPlacements, refuse_other_hosts
from composer_mesh.tasks.loading import make_task, make_workflow


class UsageError(Exception):
    """A command cannot run with the given arguments."""


def accepted(arguments: argparse.Namespace) -> Config:
    """Return the config after all checks; raises exceptions that `main` prints as one message."""
    config = listed(load_config(arguments.config, arguments.set))
    accept(config)
    startable(config)
    return config


def listed(config: Config) -> Config:
    """Return the config with the tools of its MCP servers, which are started to be asked."""
    if config.run.import_paths:
        add_import_paths(config.run.import_paths)
    return with_tools(config)


def accept(config: Config) -> ProcessPlacements:
    """Check a run's config, keys, model folder and custom functions; return its placement."""
    if config.run.import_paths:
        add_import_paths(config.run.import_paths)
    task = make_task(config)
    check_task(config, task)
    make_workflow(config)
    check_keys(config)
    check_policy_files(config)
    check_vllm_fits(config)
    try:
        check_custom_functions(config)
        check_run_trackers(config)
    except (TrackerRefused, ValueError) as error:
        raise UsageError(str(error)) from error
    placements = ProcessPlacements.of(config)
    check_policy_template(config, task.tools)
    return placements


def use_umask(config: Config) -> None:
    """Set who can read the files that this command and the processes of the run write."""
    set_umask(GROUP_UMASK if config.run.group_readable else PRIVATE_UMASK)


def startable(config: Config) -> None:
    """Raise where the run would start on this machine, but was placed on another one."""
    refuse_other_hosts(config)
    if not config.cluster.remote:  # remote hosts are checked when the run attaches to them
        check_vllm_installed(config)
        if config.trainer.lora is not None and find_spec("peft") is None:
            raise LoraMissing()
        if config.trainer.optimizer == "adamw_8bit" and find_spec("torchao") is None:
            raise LowbitMissing()
        check_torchft(config.islands)


def items(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def numbers(option: str, text: str) -> list[int]:
    """Parse comma-separated integers; raises `UsageError`."""
    try:
        return [int(item) for item in items(text)]
    except ValueError:
        raise UsageError(
            f"{option} is {text!r} but must be whole numbers with commas between them: write for "
            f"example {option} 0,1,2"
        ) from None
