"""Hostile and broken model folders are told by `check` in one line and in time, and run nothing.

The program of `template_process` runs in a copy of this process, which has imported transformers
already, with the limits that it has in a run.
"""

from __future__ import annotations

import io
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hostile_models import HostileModels, forked
from model_families import family_folder

from composer_mesh.actors.models.policy import build_tokenizer, frame
from composer_mesh.actors.models.template_process import TemplateLimits
from composer_mesh.actors.models.template_program import main
from composer_mesh.configs.schema import Config
from composer_mesh.planning.model_facts import ModelFacts, check_model_fits
from composer_mesh.planning.model_folder import UnfitModelFolder, check_model_folder
from composer_mesh.planning.model_refusals import UnfitModel
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

LONGEST_S = 10.0
CONFIG = Config.model_validate(
    {
        "data": {"task": "toolbox"},
        "run": {"name": "hostile", "steps": 1},
        "schedule": {"prompts_per_step": 1, "group_size": 2},
        "policy": {"max_context": 512},
        "generator": {"max_new_tokens": 32},
    }
)
TASK = ToolboxTask.create(TaskSettings(seed=3))
ENDED = {-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGKILL, 1}


def checked(folder: Path) -> str:
    """What `check` says of a folder; empty where it is accepted."""
    try:
        check_model_folder(folder)
        request = (
            json.dumps(
                {"check": {"tools": TASK.tools, "hints": True, "chat": CONFIG.policy.chat}}
            ).encode()
            + b"\n"
        )
        said, status = forked(lambda pipe: _program(folder, request, pipe))
        if not said:
            assert status in ENDED, status
            return f"exceeds its limits ({status})"
        told = json.loads(said)
        if "error" in told:
            raise UnfitModelFolder(str(folder), told["error"])
        check_model_fits(ModelFacts.of(told["facts"]), CONFIG)
    except (UnfitModelFolder, UnfitModel) as error:
        return str(error)
    return ""


def _program(folder: Path, request: bytes, pipe: int) -> None:
    _as_a_program()
    with os.fdopen(pipe, "wb") as answers:
        main(folder, asdict(TemplateLimits()), io.BytesIO(request), answers)
    os._exit(0)


def _as_a_program() -> None:
    """Leave behind what pytest does to this process: errors of warnings, and its output."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def loads(folder: Path) -> bool:
    """Whether the processes of a run could load an accepted folder."""

    def program(pipe: int) -> None:
        from composer_mesh.actors.models.policy import load_model

        _as_a_program()
        load_model(folder)
        os.write(pipe, b"loaded")
        os._exit(0)

    return forked(program)[0] == b"loaded"


@pytest.fixture
def models(tmp_path: Path) -> HostileModels:
    import composer_mesh.actors.models.model_facts  # noqa: F401 imported before the forks

    tokenizer = build_tokenizer([frame(TASK.tools)] * 20, 400)
    whole = family_folder("qwen3", tokenizer, tmp_path / "whole")
    return HostileModels(whole, tmp_path / "attacked")


def test_a_hostile_model_folder_is_told_in_one_line_and_in_time(
    models: HostileModels,
    tmp_path: Path,
    cases: Callable[[int], Iterator[int]],
) -> None:
    refused, seen, slowest = 0, 0, 0.0
    assert checked(tmp_path / "whole") == ""
    for seed in cases(16):
        folder = tmp_path / str(seed)
        how = models.make(seed, folder)
        began = time.process_time() + os.times().children_user
        told = checked(folder)
        took = time.process_time() + os.times().children_user - began
        seen, refused, slowest = seen + 1, refused + bool(told), max(slowest, took)
        assert took < LONGEST_S, (seed, how, took, told)
        assert told.isprintable(), (seed, how, told)
        assert len(told) < 1200, (seed, how, told)
        assert "Traceback" not in told, (seed, how, told)
        assert told or loads(folder), (seed, how)
        assert not (tmp_path / "attacked").exists(), (seed, how)
    print(f"{seen} folders, {refused} refused, the slowest took {slowest:.1f} s of CPU time")
    assert refused > seen / 2
