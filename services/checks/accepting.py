"""Checks a command's config before anything is started, and parses option values.

Checked are the user's functions, trackers, model folders and the limit of open files. Loads neither
torch nor Monarch, so that a refusal is immediate. A model folder that is not on this machine is
checked where the run starts; the built-in policy is made by the run itself.
"""

from __future__ import annotations

import json
import resource
from contextlib import closing
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_mesh.actors.engines.vllm_settings import check_vllm_fits, check_vllm_installed
from composer_mesh.actors.models.template_process import TemplateProcess
from composer_mesh.configs import plugins
from composer_mesh.configs.hub import id_of
from composer_mesh.configs.paths import TEACHER_KEY
from composer_mesh.configs.schema import Config
from composer_mesh.configs.tracking import CustomTracking, RegisteredTracking
from composer_mesh.configs.user_code import CustomFunctionError
from composer_mesh.mesh.environment import GROUP_UMASK, PRIVATE_UMASK, add_import_paths, set_umask
from composer_mesh.mesh.task_resources import with_tools
from composer_mesh.planning.model_facts import ModelFacts, check_model_fits, check_model_teaches
from composer_mesh.planning.model_folder import UnfitModelFolder, check_model_folder, has_weights
from composer_mesh.planning.model_refusals import LoraMissing, LowbitMissing
from composer_mesh.services.checks.hub import download_models, with_models
from composer_mesh.services.checks.keys import check_keys
from composer_mesh.services.checks.task import check_task
from composer_mesh.services.directory.sft_start import started
from composer_mesh.services.pool.process_placement import ProcessPlacements, refuse_other_hosts
from composer_mesh.services.steps.custom_functions import try_custom_functions
from composer_mesh.services.trackers.port import TrackerRefused, check_trackers, custom_class
from composer_mesh.tasks.errors import TaskError, code_of_task
from composer_mesh.tasks.loading import make_task, make_workflow


def check_custom_functions(config: Config) -> None:
    """Import the configured functions and call them on examples; raises CustomFunctionError.

    They are also searched in `run.import_paths`, here and in processes started later. A loss and an
    advantage are called in a process of their own; channels and a backend are imported here.
    """
    add_import_paths(config.run.import_paths)
    try_custom_functions(config)
    if config.channels:
        from composer_mesh.channels.port import make_channel

        for name, channel in config.channels.items():
            make_channel(name, channel)
    if (backend := config.trainer.backend) is not None:
        from composer_mesh.actors.models.backend import check_backend

        check_backend(backend)


def check_run_trackers(config: Config) -> None:
    """Raise TrackerRefused for a tracker that lacks a package, a variable or its class."""
    for section in config.tracking:
        if isinstance(section, CustomTracking | RegisteredTracking):
            add_import_paths(config.run.import_paths)
            custom_class(section.import_path)
        else:
            plugins.require("trackers", section.type)
    check_trackers(config.tracking)


def check_policy_files(config: Config) -> None:
    """Raise `UnfitModelFolder` where files are missing or broken, or hold weights like NaN."""
    if (folder := _folder(config)) is not None:
        check_model_folder(folder, weights_later=id_of(config.policy.path) is not None)
    if (other := _teacher_folder(config)) is not None:
        teacher = config.sdpo.teacher_model
        later = teacher is not None and id_of(teacher.path) is not None
        try:
            check_model_folder(other, weights_later=later)
        except UnfitModelFolder as error:
            raise error.at(TEACHER_KEY) from None


def check_policy_template(config: Config, tools: list[dict[str, Any]]) -> None:
    """Raise `UnfitModelFolder` where a tokenizer or the policy's chat template cannot be used.

    Raises `UnfitModel` where a model cannot do what the config asks of it. Tokenizers and templates
    run in a process of their own, whose CPU time and memory are limited.
    """
    if (facts := _facts(config, tools)) is not None:
        check_model_fits(facts, config)
    folder = _folder(config)
    if (other := _teacher_folder(config)) is not None:
        check_model_teaches(_checked_teacher(other, folder, has_weights(other)), config)


def chat_remarks(config: Config, tools: list[dict[str, Any]]) -> list[str]:
    """Return lines that say how the policy's chat template has the tools of a task."""
    facts = _facts(config, tools) if tools else None
    return [] if facts is None else [f"policy: {facts.chat}"]


def _facts(config: Config, tools: list[dict[str, Any]]) -> ModelFacts | None:
    """Return what is known of the policy's folder; None without one."""
    folder = _folder(config)
    if folder is None:
        return None
    chat = json.dumps(config.policy.chat)
    return _checked(folder, json.dumps(tools), config.sdpo.on, chat, has_weights(folder))


@lru_cache
def _checked_teacher(folder: Path, policy: Path | None, _weights: bool) -> ModelFacts:
    """Return the facts of a teacher's folder, anew when its weights are there."""
    with closing(TemplateProcess(folder)) as templates:
        return templates.check_teacher_of(policy)


@lru_cache
def _checked(folder: Path, tools: str, hints: bool, chat: str, _weights: bool) -> ModelFacts:
    """Return the facts of a policy's folder, anew when its weights are there."""
    with closing(TemplateProcess(folder)) as templates:
        return templates.check(json.loads(tools), hints, json.loads(chat))


def _folder(config: Config) -> Path | None:
    return _there(config.policy.folder)


def _teacher_folder(config: Config) -> Path | None:
    other = config.sdpo.teacher_model
    return None if other is None or not config.sdpo.on else _there(other.folder)


def _there(folder: Path | None) -> Path | None:
    return folder if folder is not None and (folder / "config.json").is_file() else None


class UsageError(Exception):
    """A command cannot run with the given arguments."""


def accepted(config: Config, *, here: bool = True) -> Config:
    """Return the config after all checks; raises exceptions that `main` prints as one message.

    With `here` False it is for a run that starts on another machine.
    """
    config = listed(config.model_copy(update={"sft": None}))  # that is about another run
    accept(config)
    startable(config, here=here)
    return config


def listed(config: Config) -> Config:
    """Return the config with what others know: its start, ids of hubs at their commits, and tools.

    The config's MCP servers are started to list their tools.
    """
    config = started(config)
    if config.run.import_paths:
        add_import_paths(config.run.import_paths)
    return with_tools(with_models(config))


def accept(config: Config) -> ProcessPlacements:
    """Check a run's config, keys, model folder and custom functions; return its placement."""
    if config.run.import_paths:
        add_import_paths(config.run.import_paths)
    task = make_task(config)
    check_task(config, task)
    if (workflow := make_workflow(config)) is not None:
        with code_of_task("checking the task by rollouts.workflow", TaskError):
            workflow.check_task(task)
    check_keys(config)
    check_policy_files(config)
    check_vllm_fits(config)
    try:
        check_custom_functions(config)
        check_run_trackers(config)
    except CustomFunctionError:
        raise
    except (TrackerRefused, ValueError) as error:
        raise UsageError(str(error)) from error
    placements = ProcessPlacements.of(config)
    check_policy_template(config, task.tools)
    return placements


def use_umask(config: Config) -> None:
    """Set who can read the files that this command and the processes of the run write."""
    set_umask(GROUP_UMASK if config.run.group_readable else PRIVATE_UMASK)


def startable(config: Config, *, here: bool = True) -> None:
    """Raise where the run would start on this machine, but was placed on another one.

    Downloads the weights of its models, and checks them, if the run starts `here`.
    """
    refuse_other_hosts(config)
    if not config.cluster.remote:  # remote hosts are checked when the run attaches to them
        check_packages(config)
    if here and download_models(config):
        accept(config)


def check_packages(config: Config) -> None:
    """Raise where this machine lacks a package that a config needs; the message names its extra."""
    check_vllm_installed(config)
    if config.trainer.lora is not None and find_spec("peft") is None:
        raise LoraMissing()
    if config.trainer.optimizer == "adamw_8bit" and find_spec("torchao") is None:
        raise LowbitMissing()
    if config.islands.on:
        plugins.load("checks", "islands")(config.islands)


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


NEEDED = 256
"""Files of a command that starts actors or opens several runs: stores, logs and connections."""


def allow_open_files(command: str) -> None:
    """Raise the limit of this process and its children to `NEEDED`, unless it is higher.

    Raises `UsageError` where the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= NEEDED:
        return
    if hard != unlimited and hard < NEEDED:
        raise UsageError(
            f"{command} needs {NEEDED} open files, but this shell allows {hard}: raise it with "
            f"`ulimit -n {NEEDED}`, or in the limits of the service or the container"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (NEEDED, hard))
